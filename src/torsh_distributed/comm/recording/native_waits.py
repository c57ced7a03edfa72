"""Times what a thread waits for on torch's own groups, such as gloo's, as our groups do by themselves.

torch tells nobody when a host waits for its operations. While somebody asks, the methods of its groups and of its
handles are replaced by ones that emit a WaitEvent around them; then they are what they were.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torsh_distributed import events

_OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_single_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
}
"""By method of torch's groups, under the names of all supported versions; a version has some of them."""

_lock = threading.Lock()
_num_askers = 0
_replaced: dict[tuple[type, str], Any] = {}
_started: weakref.WeakKeyDictionary[dist.Work, tuple[str, str]] = weakref.WeakKeyDictionary()
"""The operation and the group of a handle."""


@contextmanager
def timed_native_groups() -> Iterator[None]:
    """Emit WaitEvents for torch's own groups in this process, in every thread. Our groups are not touched."""
    global _num_askers
    with _lock:
        _num_askers += 1
        if _num_askers == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _num_askers -= 1
            if _num_askers == 0:
                for (owner, name), method in _replaced.items():
                    setattr(owner, name, method)
                _replaced.clear()


def _replace() -> None:
    for name, operation in _OPERATIONS.items():
        method = dist.ProcessGroup.__dict__.get(name)
        if method is not None:
            _replaced[dist.ProcessGroup, name] = method
            setattr(dist.ProcessGroup, name, _timed_start(getattr(dist.ProcessGroup, name), operation))
    _replaced[dist.Work, "wait"] = dist.Work.__dict__["wait"]
    dist.Work.wait = _timed_wait(dist.Work.wait)  # type: ignore[method-assign]  # put back by timed_native_groups


def _timed_start(start: Callable[..., dist.Work | None], operation: str) -> Callable[..., dist.Work | None]:
    @functools.wraps(start)
    def timed(group: dist.ProcessGroup, *args: Any, **options: Any) -> dist.Work | None:
        # A reduce-scatter fills one part and takes the others with it: its input counts, as in WaitEvent.
        counted = args[1:2] if operation.startswith("reduce_scatter") else args[:1]
        with events.waiting(operation, group.group_name, num_started=1, num_bytes=_num_bytes(counted)):
            work = start(group, *args, **options)
        if work is not None:
            _started[work] = (operation, group.group_name)
        return work

    return timed


def _timed_wait(wait: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(wait)
    def timed(work: dist.Work, *args: Any, **options: Any) -> bool:
        started = _started.get(work)
        if started is None:  # of a group in C++, as of DDP's reducer, or from before
            return wait(work, *args, **options)
        with events.waiting(*started):
            return wait(work, *args, **options)

    return timed


def _num_bytes(value: object) -> int:
    """Of a tensor, or of all in lists of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else 0
