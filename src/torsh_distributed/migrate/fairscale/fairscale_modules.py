"""What scripts and libraries import from FairScale: the modules, and the names in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

from torsh_distributed.migrate.fairscale import model_parallel, recomputing
from torsh_distributed.migrate.fairscale.nn import auto_wrap, fairscale_fsdp, sharded_ddp
from torsh_distributed.migrate.fairscale.optim import adascale, oss
from torsh_distributed.migrate.fairscale.pipe import balance_by, deferred_batch_norm, device_pipe, skip_connections

VERSION = "0.4.13"
"""The FairScale whose surface this is."""

_EXPERTS = "td.MoELayer is ours, with its gate (expert.num_experts_per_token = 2 of a plan); mesh.ep spreads experts"
_FLAT = "FSDP2 shards each parameter; nothing is flattened"
_STAGES = "pipelines between processes are mesh.pp of a plan"
_OF_FSDP = {
    "auto_wrap_bn": "wrap batch norms with mixed_precision=False, or set precision.buffer_dtype in a plan",
    "TrainingState": "FSDP2 checks the order of calls itself",
    "no_pre_load_state_dict_hook": "load_state_dict takes whole tensors by plain name",
}
_NOT_HERE = {
    "fairscale.nn": {
        "MOELayer": _EXPERTS,
        "Top2Gate": _EXPERTS,
        "PipeRPCWrapper": _STAGES,
        "FlattenParamsWrapper": _FLAT,
    },
    "fairscale.nn.misc": {"FlattenParamsWrapper": _FLAT, "ParamBucket": _FLAT, "GradBucket": _FLAT},
    "fairscale.nn.moe": {"MOELayer": _EXPERTS, "Top2Gate": _EXPERTS},
    "fairscale.nn.moe.moe_layer": {"MOELayer": _EXPERTS},
    "fairscale.nn.moe.top2gate": {"Top2Gate": _EXPERTS},
    "fairscale.nn.misc.flatten_params_wrapper": {"FlattenParamsWrapper": _FLAT, "FlatParameter": _FLAT},
    "fairscale.nn.model_parallel": dict.fromkeys(
        ("get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"), "seed ranks with torch.manual_seed"
    ),
    "fairscale.nn.data_parallel": _OF_FSDP,
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": _OF_FSDP,
    "fairscale.nn.pipe": {
        "AsyncPipe": _STAGES,
        "PipeRPCWrapper": _STAGES,
        "LazyModule": "build models on the meta device: td.parallelize fills each piece",
    },
    "fairscale.optim": {
        "Adam": "torch.optim.Adam(fused=True)",
        "Precision": "precision.dtype of a plan",
    },
}
"""Names of FairScale's that are not here, and what to use; importing one raises it."""

MISSING = {
    "fairscale.experimental": "whose parts that torch has not taken over are not here",
    "fairscale.internal": "which is FairScale's own",
    "fairscale.nn.model_parallel.random": "seed ranks with torch.manual_seed",
    "fairscale.nn.pipe.async_pipe": _STAGES,
    "fairscale.nn.pipe.rpc": _STAGES,
    "fairscale.optim.adam": "use torch.optim.Adam(fused=True)",
    "fairscale.optim.layerwise_gradient_scaler": "use ShardedGradScaler, or bf16",
}
"""Modules that are not there, with the reason; `import` of one raises it."""


def set_variables(environ: MutableMapping[str, str]) -> None:
    """FairScale has no launcher, and so no variables of its own."""


def namespaces() -> Mapping[str, Mapping[str, Any]]:
    """Every module by its name in FairScale, parents first."""
    wrapping = _public(
        auto_wrap, "auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"
    )
    fsdp = {
        "FullyShardedDataParallel": fairscale_fsdp.FairscaleFsdp,
        "get_fsdp_instances": fairscale_fsdp.fsdp_instances,
    }
    sharded = _public(sharded_ddp, "ShardedDataParallel")
    flags = _public(recomputing, "is_checkpointing", "is_recomputing")
    pipe = {"Pipe": device_pipe.Pipe, **flags}
    balance = _public(balance_by, "balance_by_time", "balance_by_size")
    scalers = {
        "GradScaler": oss.HalfGradScaler,
        "ShardedGradScaler": oss.ShardedGradScaler,
    }
    scaling = _public(adascale, "AdaScale", "AdaScaleWrapper")
    wrapper = _public(recomputing, "checkpoint_wrapper")
    switches = _public(recomputing, "disable_checkpointing", "enable_checkpointing", "enable_recomputing")
    found: dict[str, dict[str, Any]] = {
        "fairscale": {"__version__": VERSION, "__version_tuple__": tuple(map(int, VERSION.split(".")))},
        "fairscale.nn": {
            **wrapper,
            "FullyShardedDataParallel": fairscale_fsdp.FairscaleFsdp,
            **sharded,
            "Pipe": device_pipe.Pipe,
            **wrapping,
        },
        "fairscale.nn.data_parallel": {**fsdp, **sharded},
        "fairscale.nn.data_parallel.fully_sharded_data_parallel": fsdp,
        "fairscale.nn.data_parallel.sharded_ddp": sharded,
        "fairscale.nn.wrap": wrapping,
        "fairscale.nn.wrap.auto_wrap": wrapping,
        "fairscale.nn.checkpoint": {**wrapper, **flags},
        "fairscale.nn.checkpoint.checkpoint_activations": {**wrapper, **flags, **switches},
        "fairscale.nn.misc": wrapper,
        "fairscale.nn.misc.checkpoint_activations": wrapper,
        "fairscale.nn.pipe": pipe,
        "fairscale.nn.pipe.pipe": {"Pipe": device_pipe.Pipe},
        "fairscale.nn.pipe.checkpoint": {**flags, **switches},
        "fairscale.nn.pipe.batchnorm": _public(deferred_batch_norm, "DeferredBatchNorm"),
        "fairscale.nn.pipe.balance": balance,
        "fairscale.nn.pipe.skip": {
            **_public(skip_connections, "skippable", "verify_skippables"),
            "stash": skip_connections.StashCall,
            "pop": skip_connections.PopCall,
            "Namespace": skip_connections.SkipNamespace,
        },
        "fairscale.optim": {"OSS": oss.OSS, "GradScaler": oss.HalfGradScaler, **scaling},
        "fairscale.optim.oss": {"OSS": oss.OSS},
        "fairscale.optim.adascale": scaling,
        "fairscale.optim.grad_scaler": scalers,
    }
    found.update(_split_models())
    for module, names in _NOT_HERE.items():
        found[module] = {**found.get(module, {}), "__getattr__": _refusing(module, names)}
    return found


def _split_models() -> dict[str, dict[str, Any]]:
    """`fairscale.nn.model_parallel`, as Llama's reference code imports it."""
    groups = {
        name: value
        for name, value in vars(model_parallel).items()
        if callable(value) and name.startswith(("initialize_", "destroy_", "get_", "model_parallel_is"))
    }
    layers = {
        "ColumnParallelLinear": model_parallel.FairscaleColumnLinear,
        "RowParallelLinear": model_parallel.FairscaleRowLinear,
        "ParallelEmbedding": model_parallel.FairscaleNarrowEmbedding,
        "VocabParallelEmbedding": model_parallel.VocabParallelEmbedding,
    }
    mappings = _public(
        model_parallel,
        "copy_to_model_parallel_region",
        "gather_from_model_parallel_region",
        "reduce_from_model_parallel_region",
        "scatter_to_model_parallel_region",
    )
    loss = _public(model_parallel, "vocab_parallel_cross_entropy")
    root = "fairscale.nn.model_parallel"
    return {
        root: {**groups, **layers, **mappings, **loss},
        f"{root}.initialize": groups,
        f"{root}.layers": layers,
        f"{root}.mappings": mappings,
        f"{root}.cross_entropy": loss,
    }


def _refusing(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The module's `__getattr__`: a name that is not here says what to use instead."""

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"{module}.{name} is not part of torsh_distributed's fairscale: {names[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


def _public(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}
