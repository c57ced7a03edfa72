"""The sections of Accelerate's YAML, and the options of `accelerate launch` by the same names, as keys of a plan."""

from __future__ import annotations

from typing import Any

from torsh_distributed.migrate.plan_draft import (
    PlanDraft,
    Reader,
    in_host_memory,
    optimizer_in_host_memory,
    refused,
    same_by,
    stays,
    to_key,
    tuning,
)
from torsh_distributed.migrate.pytorch.fsdp_keywords import FSDP1_KEYWORDS

_STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}


def is_true(value: Any) -> bool:
    """A switch as YAML or a command line writes it."""
    return str(value).lower() in ("true", "1", "yes", "y", "on")


def _strategy(draft: PlanDraft, key: str, value: Any) -> None:
    number = int(value) if str(value).isdigit() else None
    FSDP1_KEYWORDS["sharding_strategy"](draft, key, _STRATEGIES.get(number, value) if number else value)


def _reshard(draft: PlanDraft, key: str, value: Any) -> None:
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        _strategy(draft, key, value)
    else:
        draft.honour(key, value, "fsdp.strategy", "full_shard" if is_true(value) else "shard_grad_op")


def _wrap(draft: PlanDraft, key: str, value: Any) -> None:
    table = {"TRANSFORMER_BASED_WRAP": "auto", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
    if value in table:
        draft.honour(key, value, "fsdp.wrap", table[value])
    else:
        draft.problem(key, f"{key} is {value}", f"it may be: {', '.join(table)}")


def _prefetch(draft: PlanDraft, key: str, value: Any) -> None:
    FSDP1_KEYWORDS["backward_prefetch"](draft, key, None if value in (None, "NO_PREFETCH") else value)


def _recompute(draft: PlanDraft, key: str, value: Any) -> None:
    if is_true(value):
        draft.put("activation.every_n_layers", 1)
        draft.honour(key, value, "activation.strategy", "uniform")
    else:
        draft.match(key, value, "", "activations are kept unless asked for")


def _offload(wanted: Reader) -> Reader:
    def read(draft: PlanDraft, key: str, value: Any) -> None:
        if str(value).lower() in ("cpu", "true", "1"):
            wanted(draft, key, value)
        elif str(value).lower() == "nvme":
            wanted(draft, key, value)
            draft.at_end(_needs_path, key, value)
        else:
            draft.match(key, value, "", "nothing is offloaded unless asked for")

    return read


def _needs_path(draft: PlanDraft, key: str, value: Any) -> None:
    if draft.get("offload.disk_dir") is None:
        path = key.replace("_device", "_nvme_path")
        draft.problem(key, f"{key} is nvme, but {path} is not given", "name a directory on the disk")


def _path(draft: PlanDraft, key: str, value: Any) -> None:
    if value in (None, "", "none"):
        draft.match(key, value, "", "no disk is used")
    else:
        draft.put("offload.enabled", True)
        draft.honour(key, value, "offload.disk_dir", str(value))


FSDP_KEYS: dict[str, Reader] = {
    "fsdp_version": same_by("", "shards are FSDP2's either way"),
    "fsdp_sharding_strategy": _strategy,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": _offload(in_host_memory),
    "fsdp_auto_wrap_policy": _wrap,
    "fsdp_min_num_params": to_key("fsdp.wrap_min_params", int),
    "fsdp_transformer_layer_cls_to_wrap": to_key(
        "fsdp.wrap_classes", lambda value: [one.strip() for one in str(value).split(",")]
    ),
    "fsdp_backward_prefetch": _prefetch,
    "fsdp_backward_prefetch_policy": _prefetch,
    "fsdp_state_dict_type": same_by("engine.save", "checkpoints are sharded, and load at any world size"),
    "fsdp_forward_prefetch": to_key("fsdp.forward_prefetch", is_true),
    "fsdp_use_orig_params": same_by("", "FSDP2 shards each parameter"),
    "fsdp_cpu_ram_efficient_loading": same_by("", "each rank reads its own part of safetensors files"),
    "fsdp_sync_module_states": same_by("", "all ranks begin with the parameters of rank 0"),
    "fsdp_activation_checkpointing": _recompute,
    "fsdp_activation_checkpointing_offload": to_key("activation.offload_to_cpu", is_true),
}


def _zero_stage(draft: PlanDraft, key: str, value: Any) -> None:
    stages = {"0": None, "1": "shard_optimizer", "2": "shard_grad_op", "3": "full_shard"}
    if str(value) not in stages:
        draft.problem(key, f"{key} is {value}", "stages are 0 to 3")
    elif str(value) == "0":
        draft.put("mesh.shard", 1)
        draft.honour(key, value, "mesh.dp", -1, "replicas, as under DDP")
    else:
        draft.honour(key, value, "fsdp.strategy", stages[str(value)])


def _clipping(draft: PlanDraft, key: str, value: Any) -> None:
    if value in (None, "auto"):
        draft.hint(key, value, "the training loop fills it in")
    else:
        draft.honour(key, value, "training.gradient_clipping", float(value))


def _accumulation(draft: PlanDraft, key: str, value: Any) -> None:
    if value in (None, "auto"):
        draft.hint(key, value, "the training loop fills it in")
    else:
        draft.honour(key, value, "training.gradient_accumulation", int(value))


_HOSTS = "run the line on every host: torsh run starts workers on its own machine"

DEEPSPEED_KEYS: dict[str, Reader] = {
    "deepspeed_config_file": stays("torsh migrate FILE", "that file says how to train: make its plan"),
    "zero_stage": _zero_stage,
    "offload_optimizer_device": _offload(optimizer_in_host_memory),
    "offload_param_device": _offload(in_host_memory),
    "offload_optimizer_nvme_path": _path,
    "offload_param_nvme_path": _path,
    "gradient_accumulation_steps": _accumulation,
    "gradient_clipping": _clipping,
    "zero3_init_flag": same_by("", "build the model on the meta device: each piece is filled in turn"),
    "zero3_save_16bit_model": same_by("engine.export", "whole weights in any format"),
    "deepspeed_hostfile": tuning(_HOSTS),
    "deepspeed_exclusion_filter": tuning(_HOSTS),
    "deepspeed_inclusion_filter": tuning(_HOSTS),
    "deepspeed_multinode_launcher": tuning(_HOSTS),
    "deepspeed_moe_layer_cls_names": stays("fsdp.wrap_classes"),
}


def _degree(plan_key: str, default: int = 1) -> Reader:
    def read(draft: PlanDraft, key: str, value: Any) -> None:
        draft.honour(key, value, plan_key, int(value) if value is not None else default)

    return read


def _distributed_optimizer(draft: PlanDraft, key: str, value: Any) -> None:
    if is_true(value):
        draft.refuse(key, value, 'set mesh.shard and fsdp.strategy = "shard_optimizer" in place of mesh.dp')
    else:
        draft.match(key, value, "", "off unless asked for")


_UNUSED = "the model says it: td.parallelize splits models as they are"

MEGATRON_KEYS: dict[str, Reader] = {
    f"megatron_lm_{name}": reader
    for name, reader in {
        "tp_degree": _degree("mesh.tp"),
        "pp_degree": _degree("mesh.pp"),
        "num_micro_batches": to_key("pipeline.num_microbatches", int),
        "sequence_parallelism": to_key("tensor.sequence_parallel", is_true),
        "recompute_activations": _recompute,
        "use_distributed_optimizer": _distributed_optimizer,
        "gradient_clipping": _clipping,
        "expert_model_parallel_size": _degree("mesh.ep"),
        "context_parallel_size": _degree("mesh.cp"),
        "expert_tensor_parallel_size": refused("experts are split by mesh.ep and mesh.tp", unless=(None, 1, "1")),
        "recompute_granularity": tuning("activation.strategy: uniform recomputes layers, selective all but products"),
        "recompute_method": tuning("activation.strategy says what is recomputed"),
        "recompute_num_layers": to_key("activation.every_n_layers", int),
        "optimizer_cpu_offload": _offload(optimizer_in_host_memory),
        "decoder_last_pipeline_num_layers": refused("name split_points in [pipeline]"),
        "use_precision_aware_optimizer": refused("optimizer state is fp32"),
        "overlap_cpu_optimizer_d2h_h2d": tuning("offloaded state is fetched ahead"),
        "use_custom_fsdp": refused("set mesh.shard"),
        "no_load_optim": tuning("engine.load takes what a checkpoint has"),
        "no_save_optim": tuning("engine.export saves weights alone"),
        **dict.fromkeys(
            (
                "eod_mask_loss",
                "attention_backend",
                "attention_dropout",
                "hidden_dropout",
                "attention_softmax_in_fp32",
                "calculate_per_token_loss",
                "use_rotary_position_embeddings",
            ),
            tuning(_UNUSED),
        ),
    }.items()
}


def _ulysses(draft: PlanDraft, key: str, value: Any) -> None:
    if int(value or 1) == 1:
        draft.match(key, value, "mesh.cp = 1", "sequences are whole unless asked for")
    else:
        draft.put("context.form", "ulysses")
        draft.honour(key, value, "mesh.cp", int(value), "ranks exchange positions for heads")


PARALLELISM_KEYS: dict[str, Reader] = {
    f"parallelism_config_{name}": reader
    for name, reader in {
        "dp_replicate_size": _degree("mesh.dp"),
        "dp_shard_size": _degree("mesh.shard"),
        "tp_size": _degree("mesh.tp"),
        "cp_size": _degree("mesh.cp"),
        "cp_backend": tuning("attention is split by [context]"),
        "cp_comm_strategy": tuning("context.form: ring passes keys on, ulysses exchanges heads"),
        "cp_handler": tuning("attention is split by [context]"),
        "sp_size": _ulysses,
        "sp_backend": tuning("heads are exchanged by td itself"),
        "sp_seq_length": tuning("sequences may have any length that mesh.cp divides"),
        "sp_seq_length_is_variable": tuning("sequences may have any length that mesh.cp divides"),
        "sp_attn_implementation": tuning("training.attention chooses the kernel"),
        "sp_handler": tuning("heads are exchanged by td itself"),
    }.items()
}


def _compiler(draft: PlanDraft, key: str, value: Any) -> None:
    name = str(value).upper()
    if name == "NO":
        draft.match(key, value, "compile.enabled = false", "off unless asked for")
    elif name == "INDUCTOR":
        draft.honour(key, value, "compile.enabled", True)
    else:
        draft.refuse(key, value, "torch.compile's inductor is the compiler here")


def _mode(draft: PlanDraft, key: str, value: Any) -> None:
    table = {"reduce-overhead": "compile.cuda_graphs", "max-autotune": "compile.autotune"}
    if value in table:
        if value == "reduce-overhead":
            draft.put("compile.scope", "model")
        draft.honour(key, value, table[value], True)
    else:
        draft.match(key, value, "", "torch's default mode")


DYNAMO_KEYS: dict[str, Reader] = {
    "dynamo_backend": _compiler,
    "dynamo_mode": _mode,
    "dynamo_use_fullgraph": to_key("compile.graph_breaks", lambda value: "refuse" if is_true(value) else "warn"),
    "dynamo_use_dynamic": to_key("compile.dynamic", lambda value: "always" if is_true(value) else "auto"),
    "dynamo_use_regional_compilation": to_key("compile.scope", lambda value: "layers" if is_true(value) else "model"),
}


def _fp8(draft: PlanDraft, key: str, value: Any) -> None:
    if str(value).upper() in ("AO", "TORCHAO"):
        draft.honour(key, value, "precision.dtype", "fp8")
    else:
        draft.refuse(key, value, "fp8 is torchao's here: set backend AO")


_SCALES = tuning("precision.fp8_recipe says how values are scaled")

FP8_KEYS: dict[str, Reader] = {
    "backend": _fp8,
    **dict.fromkeys(
        (
            "use_autocast_during_eval",
            "margin",
            "interval",
            "fp8_format",
            "amax_history_len",
            "amax_compute_algo",
            "override_linear_precision",
            "opt_level",
            "pad_inner_dim",
        ),
        _SCALES,
    ),
    "enable_fsdp_float8_all_gather": tuning("fsdp.gather_codec sends parameters in fewer bits"),
}
