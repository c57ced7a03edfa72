"""Accelerate's YAML: the part that says how to train becomes a plan, the part that says where a line of `torsh run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.migrate.launchers.accelerate_keys import (
    DEEPSPEED_KEYS,
    DYNAMO_KEYS,
    FP8_KEYS,
    FSDP_KEYS,
    MEGATRON_KEYS,
    PARALLELISM_KEYS,
)
from torsh_distributed.migrate.plan_draft import (
    ForeignConfig,
    PlanDraft,
    Reader,
    for_world,
    refused,
    same_by,
    stays,
    tuning,
)
from torsh_distributed.migrate.report import MigrationReport
from torsh_distributed.plan.plan import Plan

_SECTIONS: dict[str, Mapping[str, Reader]] = {
    "fsdp_config": FSDP_KEYS,
    "deepspeed_config": DEEPSPEED_KEYS,
    "megatron_lm_config": MEGATRON_KEYS,
    "parallelism_config": PARALLELISM_KEYS,
    "dynamo_config": DYNAMO_KEYS,
    "fp8_config": FP8_KEYS,
}
_TPU = refused("there is no XLA backend here", unless=(None, False, [], ""))


def _kind(draft: PlanDraft, key: str, value: Any) -> None:
    known = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
    if value in known:
        draft.accept(key, value, "[mesh] of the plan")
    elif value in ("XLA", "TPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU"):
        draft.refuse(key, value, "devices are CPUs and GPUs of NVIDIA and AMD")
    else:
        draft.problem(key, f"{key} is {value}", f"it may be: {', '.join(known)}")


def _precision(draft: PlanDraft, key: str, value: Any) -> None:
    formats = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", None: "fp32"}
    name = "no" if value is False else value  # YAML reads `no` as false
    if name in formats:
        draft.honour(key, value, "precision.dtype", formats[name])
    else:
        draft.problem(key, f"{key} is {value}", f"it may be: {', '.join(str(one) for one in formats)}")


def _cpu(draft: PlanDraft, key: str, value: Any) -> None:
    if value:
        draft.accept(key, value, "CUDA_VISIBLE_DEVICES= before torsh run", "td.init() then takes the CPU")
    else:
        draft.match(key, value, "", "GPUs are used where there are some")


KEYS: dict[str, Reader] = {
    "compute_environment": refused(
        "SageMaker starts jobs itself: use its launcher with td.init()", unless=("LOCAL_MACHINE", None)
    ),
    "distributed_type": _kind,
    "mixed_precision": _precision,
    "fp16": lambda draft, key, value: _precision(draft, key, "fp16" if value else "no"),
    "use_cpu": _cpu,
    "debug": stays("TORSH_DEBUG=1", "checks every collective on all ranks"),
    "num_processes": stays("torsh run --nproc-per-node"),
    "num_machines": stays("torsh run --nnodes"),
    "machine_rank": stays("torsh run --node-rank"),
    "main_process_ip": stays("torsh run --master-addr"),
    "main_process_port": stays("torsh run --master-port"),
    "rdzv_backend": same_by("torsh run --rdzv-backend", "the launcher of node 0 serves it"),
    "same_network": tuning("nodes meet at --master-addr"),
    "gpu_ids": stays("CUDA_VISIBLE_DEVICES before torsh run"),
    "main_training_function": tuning("a script is run, not a function of it"),
    "enable_cpu_affinity": refused("use numactl inside the job"),
    "downcast_bf16": refused("it is for TPUs", unless=(None, False, "no")),
    **dict.fromkeys(
        ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "commands"),
        _TPU,
    ),
    "dynamo_backend": DYNAMO_KEYS["dynamo_backend"],
    "mpirun_config": stays("torsh run --mpi", "or start `torsh run` on every host"),
}
"""Keys at the top of the file."""


class AccelerateConfig(ForeignConfig):
    """What `accelerate config` writes."""

    def to_plan(self) -> tuple[Plan, MigrationReport]:
        """A plan, and the verdict on every key. Raises ConfigurationError for unknown keys and values."""
        draft = PlanDraft("accelerate")
        values = dict(self.values)
        kind = values.get("distributed_type")
        if kind in ("FSDP", "DEEPSPEED") and not values.get("parallelism_config"):
            draft.put("mesh.dp", 1)
            draft.put("mesh.shard", -1)
        for name, value in values.items():
            if name in _SECTIONS:
                if isinstance(value, Mapping):
                    draft.read(value, _SECTIONS[name], f"{name}.")
                elif value:
                    draft.problem(name, f"{name} is a table of keys", f"it has: {', '.join(_SECTIONS[name])}")
            elif name in KEYS:
                KEYS[name](draft, name, value)
            else:
                draft.unknown(name, [*KEYS, *_SECTIONS])
        return draft.finish()

    def launch_options(self) -> list[str]:
        """Options of `torsh run`: how many workers, on which nodes."""
        count, machines = int(self.values.get("num_processes") or 1), int(self.values.get("num_machines") or 1)
        options = ["--nproc-per-node", str(max(1, count // machines))]
        if machines > 1:
            options += ["--nnodes", str(machines), "--node-rank", str(self.values.get("machine_rank", 0))]
            for key, option in (("main_process_ip", "--master-addr"), ("main_process_port", "--master-port")):
                if self.values.get(key):
                    options += [option, str(self.values[key])]
        return options


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether a parsed file is of this kind, by the names at its top."""
    return "distributed_type" in document or "compute_environment" in document


def translate(path: Path, **options: Any) -> tuple[Plan, MigrationReport]:
    """The plan of the file, and the report on it, for `torsh migrate FILE`."""
    return for_world(AccelerateConfig.from_file(path).to_plan(), **options)
