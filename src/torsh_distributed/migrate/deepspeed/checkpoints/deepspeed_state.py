"""A checkpoint of DeepSpeed as a state that any of our plans can load: whole tensors by name, read as they are needed.

Stages 0 to 3 and universal checkpoints, of any number of data-parallel ranks, and the stages of a pipeline. Weights are
the fp32 ones that the optimizer keeps; what it does not train comes from the model files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.deepspeed.checkpoints.unsharded_files import from_plain_optimizer, from_universal
from torsh_distributed.migrate.deepspeed.checkpoints.zero_shards import NamedState, Shapes, from_shards, whole_tensor
from torsh_distributed.migrate.foreign_state import ForeignState, InertRecord, PiecedTensor, load_safely, plain_settings
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER
from torsh_distributed.unreadable_data import unreadable_as

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt")


@dataclass(frozen=True)
class ShardFiles:
    """The files of one tag. Keys: the model-parallel rank, then the data-parallel rank."""

    directory: Path
    models: dict[int, dict[int, Path]] = field(default_factory=dict)
    """Stages 0 to 2 have one file for each model-parallel rank, under data-parallel rank 0; stage 3 has one each."""
    optimizers: dict[int, dict[int, Path]] = field(default_factory=dict)
    layers: dict[int, Path] = field(default_factory=dict)
    """Of a pipeline: one file for each layer."""
    universal: Path | None = None
    """The directory with a folder for each parameter, of a universal checkpoint."""


def find_files(source: Path, tag: str | None = None) -> ShardFiles:
    """The files of a tag, of the newest one if none is named; `source` may be the tag's own directory.

    Raises CheckpointError if there is none, if a shard is missing, or if the shards cannot be put together.
    """
    directory = _tag_directory(source, tag)
    found = ShardFiles(directory, universal=directory / "zero" if (directory / "zero").is_dir() else None)
    for path in sorted(directory.iterdir()):
        if _EXPERT.fullmatch(path.name):
            raise CheckpointError(
                f"{directory.name} has experts in files of their own ({path.name}), which are not read",
                hint="convert it with DeepSpeed's ds_to_universal.py, and read the universal checkpoint",
            )
        if name := _MODEL.fullmatch(path.name):
            found.models.setdefault(int(name[1]), {})[0] = path
        elif name := _MODEL_SHARD.fullmatch(path.name):
            found.models.setdefault(int(name[2]), {})[int(name[1])] = path
        elif name := _OPTIMIZER_SHARD.fullmatch(path.name):
            found.optimizers.setdefault(int(name[2]), {})[int(name[1])] = path
        elif name := _LAYER.fullmatch(path.name):
            found.layers[int(name[1])] = path
    if not found.models and any(directory.glob("step-*")):
        raise CheckpointError(
            f"{directory} was saved under `torsh run --as deepspeed`: it is a checkpoint of this library already",
            hint=f"load it as it is, or write its weights: torsh checkpoint export {directory} weights --safetensors",
        )
    if not found.models:
        raise CheckpointError(
            f"{directory} is not a checkpoint of DeepSpeed: it has no *_model_states.pt",
            hint="name the directory that save_checkpoint was given, or one of its tags",
        )
    _require_no_gap(found)
    return found


def _tag_directory(source: Path, tag: str | None) -> Path:
    if not source.is_dir():
        raise CheckpointError(f"there is no directory {source}", hint="name what save_checkpoint was given")
    if tag is not None:
        if Path(tag).name != tag:
            raise CheckpointError(f"{tag!r} is not a tag", hint="a tag is the name of one directory")
        if not (source / tag).is_dir():
            raise CheckpointError(f"{source} has no tag {tag}", hint=f"it has: {', '.join(_tags(source)) or 'none'}")
        return source / tag
    for name in ("latest", "latest_universal"):
        if (source / name).is_file():
            newest = (source / name).read_text(errors="replace").strip()
            if Path(newest).name == newest and len(newest) <= 200 and (source / newest).is_dir():
                return source / newest
            raise CheckpointError(
                f"{source / name} names {newest[:200]!r}, which is not there",
                hint=f"name a tag: {', '.join(_tags(source)) or 'there is none'}",
            )
    return source


def _tags(source: Path) -> list[str]:
    return sorted(path.name for path in source.iterdir() if path.is_dir() and any(path.glob("*_model_states.pt")))


def _require_no_gap(found: ShardFiles) -> None:
    for what, files in (("model", found.models), ("optimizer", found.optimizers)):
        for rank, shards in files.items():
            missing = [number for number in range(max(shards) + 1) if number not in shards]
            if missing:
                raise CheckpointError(
                    f"{found.directory.name} lacks the {what} shard of data-parallel rank {missing[0]}"
                    f" (model-parallel rank {rank}): it has {len(shards)} of {max(shards) + 1}",
                    hint="copy it from the node that wrote it: every rank saves its own shard",
                )
        absent = [rank for rank in range(max(files, default=-1) + 1) if rank not in files]
        if absent:
            raise CheckpointError(
                f"{found.directory.name} lacks the {what} shards of model-parallel rank {absent[0]}",
                hint="copy them from the node that wrote them: every rank saves its own shard",
            )


_OF_DEEPSPEED = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "csr_tensor_module_names"),
        *("ds_autoep_layers", "autoep_layers", "num_experts", "compression_training"),
    }
)
"""Keys of a model file that are DeepSpeed's own; all others are the script's client state."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint says beside its tensors."""

    stage: int
    num_data_ranks: int
    global_steps: int
    skipped_steps: int
    global_samples: int
    lr_scheduler: Any
    config: Mapping[str, Any]
    """The DeepSpeed config it was trained with."""
    version: str | None
    """Of DeepSpeed."""
    client_state: Mapping[str, Any]
    loss_scaler: Mapping[str, Any]
    """What the loss scaler held: `cur_scale` and others; empty if there was none."""


class DeepSpeedState(ForeignState):
    """A checkpoint of DeepSpeed to load from, by the names of the model's parameters."""

    def __init__(
        self, place: Path, tensors: Mapping[str, PiecedTensor], values: Mapping[str, Any], facts: CheckpointFacts
    ) -> None:
        self.facts = facts
        super().__init__(
            place,
            tensors,
            values,
            step=facts.global_steps,
            num_ranks=facts.num_data_ranks,
            client_state=facts.client_state,
        )


def open_checkpoint(
    source: str | Path, tag: str | None = None, *, with_optimizer: bool = True, inert: Sequence[str] = ()
) -> DeepSpeedState:
    """The checkpoint that DeepSpeed's `save_checkpoint` wrote to `source`, of the newest tag or of `tag`.

    Files are mapped and read with torch's `weights_only`; see `foreign_state` for `inert`. Raises CheckpointError for a
    missing shard, files of several saves, and files that name what is not on the list.
    """
    files = find_files(Path(source), tag)
    with unreadable_as(
        CheckpointError,
        f"{files.directory.name} is not laid out as DeepSpeed's checkpoints are",
        hint="copy it again; a file of it is damaged or was not written by DeepSpeed",
        path=str(files.directory),
    ):
        return _opened(files, with_optimizer=with_optimizer, inert=inert)


def _opened(files: ShardFiles, *, with_optimizer: bool, inert: Sequence[str]) -> DeepSpeedState:
    found, buffers, shared = NamedState(), dict[str, PiecedTensor](), dict[str, str]()
    first: Mapping[str, Any] = {}
    for rank in sorted(files.models):
        models = [_model_file(files.models[rank][number], inert) for number in sorted(files.models[rank])]
        first = first or models[0]
        part = _part(files, rank, models, with_optimizer=with_optimizer, inert=inert)
        _refuse_tensor_parallel(files, found, part)
        found.join(part)
        found.loss_scaler = found.loss_scaler or part.loss_scaler
        buffers |= _untrained(models, part)
        shared |= models[0].get("shared_params") or {}
    for number, path in sorted(files.layers.items()):
        for name, value in load_safely(path, inert=inert).items():
            buffers.setdefault(f"{number}.{name}", whole_tensor(value))
    weights = {**buffers, **found.weights}
    weights |= {name: weights[other] for name, other in shared.items() if other in weights}
    facts = _facts(files, first, found)
    tensors = {f"{MODEL}.{name}": one for name, one in weights.items()}
    values: dict[str, Any] = {MODEL: {}, "engine": _engine_values(facts)}
    if with_optimizer:
        for name, entries in found.moments.items():
            tensors |= {f"{OPTIMIZER}.state.{name}.{entry}": one for entry, one in entries.items()}
        groups = [plain_settings(group) for group in found.groups]
        if _zero(facts.config).get("round_robin_gradients"):
            order = {name: number for number, name in enumerate(first["module"])}
            for group in groups:  # dealt out to the ranks in turns; the script gave them in the model's order
                group["params"].sort(key=lambda name: order.get(name, len(order)))
        values[OPTIMIZER] = {"param_groups": groups, "plain": {}}
    return DeepSpeedState(files.directory, tensors, values, facts)


def _part(
    files: ShardFiles, rank: int, models: Sequence[Mapping[str, Any]], *, with_optimizer: bool, inert: Sequence[str]
) -> NamedState:
    """What one model-parallel rank trained."""
    groups: list[Shapes] = models[0].get("param_shapes") or []
    if files.universal is not None:
        return from_universal(files.universal, groups, files.directory, inert=inert)
    if files.optimizers.get(rank):
        shards = [load_safely(files.optimizers[rank][number], inert=inert) for number in sorted(files.optimizers[rank])]
        return from_shards(shards, groups, files.directory)
    if len(models) > 1 or groups:
        raise CheckpointError(
            f"{files.directory.name} has no *_optim_states.pt for model-parallel rank {rank}, which hold the weights",
            hint="copy the optimizer files too: every rank saves its own",
        )
    optimizer = models[0].get("optimizer")
    if optimizer is None or not with_optimizer:
        return NamedState()
    params = {name: value for name, value in models[0]["module"].items() if name not in models[0]["buffer_names"]}
    return from_plain_optimizer(optimizer, params, files.directory)


def _model_file(path: Path, inert: Sequence[str]) -> Mapping[str, Any]:
    found = load_safely(path, inert=inert)
    if not isinstance(found, Mapping) or "module" not in found or "buffer_names" not in found:
        raise CheckpointError(f"{path.name} is not a model file of DeepSpeed", hint="copy it again", path=str(path))
    return found


def _untrained(models: Sequence[Mapping[str, Any]], part: NamedState) -> dict[str, PiecedTensor]:
    """Buffers, and parameters that the optimizer does not have."""
    module = models[0]["module"] or {}
    found = {
        name: whole_tensor(value)
        for name, value in module.items()
        if isinstance(value, Tensor)
        and name not in part.weights
        and (value.numel() or name in models[0]["buffer_names"])
    }
    shapes = models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    for name, shape in shapes.items():
        held = [one[name].flatten() for one in fragments if name in one]
        if sum(one.numel() for one in held) < math.prod(shape):
            raise CheckpointError(
                f"the frozen parameter {name} is not whole in the model files", hint="copy them again"
            )
        numel = math.prod(shape)
        whole = held[0] if held[0].numel() >= numel else torch.cat(held)
        found[name] = whole_tensor(whole[:numel].reshape(tuple(shape)))
    return found


def _refuse_tensor_parallel(files: ShardFiles, found: NamedState, part: NamedState) -> None:
    """Ranks of a pipeline have parameters of their own; equal names mean that each rank has a slice."""
    for name in part.weights:
        if name in found.weights and not torch.equal(found.weights[name].read(), part.weights[name].read()):
            raise CheckpointError(
                f"{files.directory.name} has {name} in slices on several model-parallel ranks",
                hint="convert it with DeepSpeed's ds_to_universal.py, and read the universal checkpoint",
            )


def _facts(files: ShardFiles, model: Mapping[str, Any], found: NamedState) -> CheckpointFacts:
    config = model.get("ds_config")
    config = config if isinstance(config, Mapping) else {}
    stage = _zero(config).get("stage", int(config.get("zero_optimization") is True))
    scaler = found.loss_scaler
    held = dict(vars(scaler)) if isinstance(scaler, InertRecord) else dict(scaler or {})
    return CheckpointFacts(
        stage=int(stage),
        num_data_ranks=int(model.get("dp_world_size") or 1),
        global_steps=int(model.get("global_steps") or 0),
        skipped_steps=int(model.get("skipped_steps") or 0),
        global_samples=int(model.get("global_samples") or 0),
        lr_scheduler=model.get("lr_scheduler"),
        config=config,
        version=model.get("ds_version"),
        client_state={key: value for key, value in model.items() if key not in _OF_DEEPSPEED},
        loss_scaler={key: value for key, value in held.items() if isinstance(value, bool | int | float)},
    )


def _zero(config: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = config.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def _engine_values(facts: CheckpointFacts) -> dict[str, Any]:
    """The state of an Engine after as many updates. The position in the data is the script's: it was not saved."""
    scale = facts.loss_scaler.get("cur_scale", facts.loss_scaler.get("loss_scale"))
    precision: dict[str, Any] = {}
    if scale is not None and float(scale) != 1:
        precision = {
            "scale": float(scale),
            "growth_factor": float(facts.loss_scaler.get("scale_factor", 2.0)),
            "backoff_factor": 1 / float(facts.loss_scaler.get("scale_factor", 2.0)),
            "growth_interval": int(facts.loss_scaler.get("scale_window", 1000)),
            "_growth_tracker": 0,
        }
    return {
        "precision": precision,
        "learning_rate": {"factor": 1.0, "scheduler": facts.lr_scheduler},
        "num_steps": facts.global_steps - facts.skipped_steps,
        "num_skipped": facts.skipped_steps,
        "epoch": 0,
        "num_batches": 0,
        "position": None,
    }
