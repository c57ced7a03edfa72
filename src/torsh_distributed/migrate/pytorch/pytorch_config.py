"""Settings of torch's own classes in one dict: a plan, with a verdict on every keyword. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.migrate.plan_draft import (
    ForeignConfig,
    PlanDraft,
    Reader,
    for_world,
    same_by,
    stays,
    to_key,
    tuning,
)
from torsh_distributed.migrate.pytorch.fsdp_keywords import FSDP1_KEYWORDS, FULLY_SHARD_KEYWORDS
from torsh_distributed.migrate.pytorch.hook_keywords import (
    DDP_KEYWORDS,
    GROUP_KEYWORDS,
    PIPE_KEYWORDS,
    SCALER_KEYWORDS,
    read_comm_hook,
)
from torsh_distributed.migrate.report import MigrationReport
from torsh_distributed.plan.plan import Plan

_OF_TORCH: dict[str, Reader] = {
    "TORCH_NCCL_BLOCKING_WAIT": same_by("", "every wait has a deadline that names the missing ranks"),
    "NCCL_BLOCKING_WAIT": same_by("", "every wait has a deadline that names the missing ranks"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": same_by("", "a failure on one rank releases the others"),
    "NCCL_ASYNC_ERROR_HANDLING": same_by("", "a failure on one rank releases the others"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": same_by("td.comm.recorder", "the last operations are always recorded"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": same_by("torsh doctor", "a hang is diagnosed without a dump"),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": to_key("elastic.heartbeat_timeout_s", float),
    "TORCH_DISTRIBUTED_DEBUG": stays("TORSH_DEBUG=1", "checks every collective on all ranks"),
    "GLOO_SOCKET_IFNAME": stays("the same variable"),
    "MASTER_ADDR": same_by("torsh run --master-addr", "the launcher sets it"),
    "MASTER_PORT": same_by("torsh run --master-port", "the launcher sets it"),
}


def read_variables(draft: PlanDraft, values: Mapping[str, Any]) -> None:
    """NCCL_… reaches NCCL as it is; torch's own variables have counterparts."""
    for name, value in values.items():
        if name in _OF_TORCH:
            _OF_TORCH[name](draft, f"nccl.{name}", value)
        elif name.startswith("NCCL_"):
            draft.accept(f"nccl.{name}", value, "the same variable", "workers inherit it, and NCCL reads it")
        else:
            draft.unknown(f"nccl.{name}", list(_OF_TORCH))


def _deterministic(draft: PlanDraft, key: str, value: Any) -> None:
    if value:
        draft.accept(
            key, value, "the same switch", "on CPUs distributed.deterministic fixes the order of sums over ranks"
        )
    else:
        draft.match(key, value, "", "off unless asked for")


CUDNN_KEYWORDS: dict[str, Reader] = {
    "enabled": stays("the same switch", "it is torch's, and of this process"),
    "benchmark": stays("the same switch", "it is torch's, and of this process"),
    "benchmark_limit": stays("the same switch", "it is torch's, and of this process"),
    "deterministic": _deterministic,
    "allow_tf32": stays("torch.set_float32_matmul_precision"),
    "fp32_precision": stays("the same switch"),
    "verbose": tuning("it is torch's own"),
}
"""Switches of torch.backends.cudnn."""


TABLES: dict[str, Mapping[str, Reader]] = {
    "init_process_group": GROUP_KEYWORDS,
    "grad_scaler": SCALER_KEYWORDS,
    "ddp": DDP_KEYWORDS,
    "fsdp": FSDP1_KEYWORDS,
    "fully_shard": FULLY_SHARD_KEYWORDS,
    "pipe": PIPE_KEYWORDS,
    "cudnn": CUDNN_KEYWORDS,
}
"""Sections whose keys are keywords of a class or function of torch's."""
_READERS: dict[str, Callable[[PlanDraft, Mapping[str, Any]], None]] = {
    "comm_hook": read_comm_hook,
    "nccl": read_variables,
}
_SECTIONS = (*TABLES, *_READERS)


def from_torch(**sections: Mapping[str, Any]) -> tuple[Plan, MigrationReport]:
    """A plan from keywords: `from_torch(fsdp={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, …)`.

    Sections: ddp, fsdp (FSDP1), fully_shard, comm_hook (hook, state, wrapper), grad_scaler, pipe (torch's old one),
    init_process_group, cudnn, nccl (variables). Values are torch's own objects, or their names.
    """
    draft = PlanDraft("pytorch")
    sharded = {"fsdp", "fully_shard"} & sections.keys()
    if sharded:
        draft.put("mesh.dp", 1)
        draft.put("mesh.shard", -1)
    if len(sharded) == 2 or (sharded and "ddp" in sections):
        draft.problem(
            "fsdp",
            f"{' and '.join(sorted({*sharded, *({'ddp'} & sections.keys())}))} wrap one model",
            "keep one of them",
        )
    for name, values in sections.items():
        if name in TABLES:
            draft.read(values, TABLES[name], f"{name}.")
        elif name in _READERS:
            _READERS[name](draft, values)
        else:
            draft.unknown(name, list(_SECTIONS))
    return draft.finish()


class PyTorchConfig(ForeignConfig):
    """The same settings in a dict or a YAML, JSON or TOML file with these sections."""

    def to_plan(self) -> tuple[Plan, MigrationReport]:
        """A plan, and the verdict on every keyword."""
        return from_torch(**self.values)


def looks_like(document: Mapping[str, Any]) -> bool:
    """Whether a parsed file is of this kind, by the names at its top."""
    return bool(document) and not document.keys() - set(_SECTIONS)


def translate(path: Path, **options: Any) -> tuple[Plan, MigrationReport]:
    """The plan of the file, and the report on it, for `torsh migrate FILE`."""
    return for_world(PyTorchConfig.from_file(path).to_plan(), **options)
