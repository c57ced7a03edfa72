"""NCCL's variables and torch.backends.cudnn's switches: what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torsh_distributed.migrate.plan_draft import PlanDraft, Reader, same_by, stays, to_key, tuning

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
