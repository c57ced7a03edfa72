"""`deepspeed.comm`: torch.distributed under another name, with a few calls more and a log of what was sent."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torsh_distributed import known_variables
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.migrate.deepspeed.initialize_group import init_distributed, local_rank
from torsh_distributed.migrate.deepspeed.observing.deepspeed_timers import wait_for_device

_log = logging.getLogger(__name__)

_TIMED = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""The operations that the log counts."""


class CommsLogger:
    """Counts and times operations by name and size, once `configure` turned it on."""

    def __init__(self) -> None:
        self.enabled = self.verbose = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.records: dict[str, dict[int, list[float]]] = {}
        """Operation, then bytes, to the seconds of each call."""

    def wants(self, name: str) -> bool:
        """Whether an operation is timed."""
        return self.enabled and (self.prof_all or name in self.prof_ops)

    def add(self, name: str, num_bytes: int, seconds: float) -> None:
        """Count one call."""
        self.records.setdefault(name, {}).setdefault(num_bytes, []).append(seconds)
        if self.verbose:
            _log.info("comm op: %s | time (ms): %.2f | bytes: %d", name, seconds * 1000, num_bytes)


_logger = CommsLogger()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the log on or off, from a config's section `comms_logger` or by arguments."""
    section: Any = deepspeed_config
    if section is not None and not isinstance(section, Mapping):
        section = getattr(section, "config", {})
    found = dict((section or {}).get("comms_logger", {}))
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose}
    found.update({key: value for key, value in given.items() if value is not None})
    _logger.enabled = bool(found.get("enabled", _logger.enabled))
    _logger.prof_all = bool(found.get("prof_all", _logger.prof_all))
    _logger.prof_ops = list(found.get("prof_ops", _logger.prof_ops))
    _logger.verbose = bool(found.get("verbose", _logger.verbose))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """A table of the operations so far; with `show_straggler` the time that ranks waited for the slowest.

    Every rank calls this.
    """
    rows: dict[str, Any] = {}
    everyone = all_gather_object(_logger.records) if show_straggler and dist.is_initialized() else [_logger.records]
    for name, by_size in _logger.records.items():
        rows[name] = {}
        for size, seconds in by_size.items():
            row = {
                "count": len(seconds),
                "total_ms": 1000 * sum(seconds),
                "mean_ms": 1000 * sum(seconds) / len(seconds),
            }
            if show_straggler:
                # The rank that comes last waits least: the rest of the time is spent on it.
                calls = zip(*(one.get(name, {}).get(size, []) for one in everyone), strict=False)
                row["straggler_ms"] = 1000 * sum(mine - min(call) for mine, call in zip(seconds, calls, strict=False))
            rows[name][size] = row
            _log.info("%s: %d bytes: %s", name, size, ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    return rows if return_dict else None


def _timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("prof", "log_name", "debug")}
        if not _logger.wants(name):
            return call(*args, **kwargs)
        wait_for_device()
        started = time.perf_counter()
        result = call(*args, **kwargs)
        wait_for_device()
        sizes = [one.numel() * one.element_size() for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        _logger.add(name, max(sizes, default=0), time.perf_counter() - started)
        return result

    return run


def get_local_rank() -> int:
    """This rank on its node."""
    return local_rank() if dist.is_initialized() else known_variables.whole_number("LOCAL_RANK")


def get_world_group() -> dist.ProcessGroup | None:
    """All ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks of a group, by their numbers in the world."""
    return dist.get_process_group_ranks(group)


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> Tensor:
    """An all-reduce."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, **_: object
) -> None:
    """An all-reduce of each tensor."""
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **_: object,
) -> None:
    """Gather each input into its output, all ranks' parts in order."""
    for output, one in zip(output_tensors, input_tensors, strict=True):
        dist.all_gather_into_tensor(output, one, group=group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """A device mesh over the world."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    """It does."""
    return True


has_reduce_scatter_tensor = has_coalescing_manager = has_all_gather_into_tensor
allgather_fn_name = "all_gather_into_tensor"


def comm_names() -> dict[str, Any]:
    """What `deepspeed.comm` has: torch.distributed's names, timed where the log wants it, and those above."""
    names = {name: getattr(dist, name) for name in dir(dist) if not name.startswith("_")}
    names.update({name: _timed(name, names[name]) for name in _TIMED if name in names})
    gather, scatter = names["all_gather_into_tensor"], names["reduce_scatter_tensor"]

    def allgather_fn(output: Tensor, one: Tensor, group: Any = None, async_op: bool = False, debug: Any = None) -> Any:
        """Gather into one tensor."""
        return gather(output, one, group=group, async_op=async_op)

    def reduce_scatter_fn(
        output: Tensor, one: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: object
    ) -> Any:
        """Reduce one tensor, and keep this rank's part."""
        return scatter(output, one, op=op, group=group, async_op=async_op)

    own = (
        configure,
        log_summary,
        get_local_rank,
        get_world_group,
        get_all_ranks_from_group,
        inference_all_reduce,
        all_reduce_coalesced,
        all_gather_coalesced,
        initialize_mesh_device,
        init_distributed,
        has_all_gather_into_tensor,
        allgather_fn,
        reduce_scatter_fn,
    )
    names.update({function.__name__: function for function in own})
    names["has_reduce_scatter_tensor"] = names["has_coalescing_manager"] = has_all_gather_into_tensor
    names["comms_logger"] = _logger
    return names
