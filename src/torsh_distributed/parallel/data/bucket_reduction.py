"""How a bucket of gradients is summed over the ranks, as the `distributed` section of a plan says.

DDP's buckets in memory that the ranks of a node share: averaging them copies nothing in or out.
DDP builds its buckets itself, first in the order of parameters, then again in the order of gradients. A bucket seen a
second time is final: its memory is replaced by shared memory, and its views stay valid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.wire import SharedBuffer
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.manager import twin_group
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.comm.scheduler import CommunicationScheduler
from torsh_distributed.comm.shared_memory.buffers import share_buffer
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.sections.distributed import DistributedConfig

_WORTH_SHARING_BYTES = 256 * 1024
_MAX_SHARED = 256
"""Each uses a file descriptor."""


class SharedBuckets:
    """The buckets of one model. Every rank of the group passes the same buckets in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._seen: dict[int, Tensor] = {}
        """Held so no other bucket can be allocated at the same address."""
        self._shared: dict[int, SharedBuffer | None] = {}

    def settle(self, index: int, buffer: Tensor, *, is_last: bool) -> None:
        """Called with each bucket just before it is averaged."""
        if buffer.layout is not torch.strided:
            return
        known = self._seen.get(index)
        if known is None or known.data_ptr() != buffer.data_ptr():
            self._seen[index] = buffer
            self._shared.pop(index, None)
        elif index not in self._shared and index < _MAX_SHARED and buffer.nbytes >= _WORTH_SHARING_BYTES:
            self._shared[index] = share_buffer(buffer, self._group)
        if is_last:
            for gone in [other for other in self._seen if other > index]:
                self._seen.pop(gone)
                self._shared.pop(gone, None)


Reduce = Callable[[Tensor], torch.futures.Future[Tensor]]
"""Start reducing a buffer over the ranks, in place; the future holds the buffer."""


def bucket_reducer(
    config: DistributedConfig, group: dist.ProcessGroup, device: torch.device, *, op: ReduceOp = ReduceOp.SUM
) -> Reduce:
    """The sum, or mean, as the plan says; every rank of the group calls this.

    Only a rate limit needs a scheduler: without one a bucket starts at once, in the backend or its algorithm.
    """
    _check_device(config, device)
    algorithm = None if config.algorithm == "backend" else config.algorithm
    deterministic = config.deterministic
    if config.rate_limit_gbps is None:
        return lambda buffer: all_reduce(
            buffer, op, group=group, algorithm=algorithm, deterministic=deterministic, async_op=True
        ).get_future()
    # The scheduler's thread starts buckets while others use the group: both must not share one order of operations.
    own = twin_group(group)
    scheduler = CommunicationScheduler(
        max_concurrent_ops=1,
        rate_limit_bytes_per_s=config.rate_limit_gbps * 1e9 / 8,
        timeout_s=config.timeout_s,
    )
    return lambda buffer: scheduler.submit(
        "all_reduce",
        lambda: all_reduce(buffer, op, group=own, algorithm=algorithm, deterministic=deterministic),
        num_bytes=buffer.numel() * buffer.element_size(),
        group=own,
    ).get_future()


def _check_device(config: DistributedConfig, device: torch.device) -> None:
    """Refuse, before the first step, what the gradients' device does not support."""
    wanted = [
        name
        for name, is_wanted in (
            (f"distributed.algorithm = {config.algorithm}", config.algorithm not in ("backend", "auto")),
            ("distributed.deterministic", config.deterministic),
            ("distributed.rate_limit_gbps", config.rate_limit_gbps is not None),
        )
        if is_wanted
    ]
    if wanted and device.type != "cpu":
        raise ConfigurationError(
            f"{' and '.join(wanted)}: for models on the CPU only",
            hint="leave it out, or keep the model on the CPU; nccl chooses its own way (NCCL_ALGO)",
            device=str(device),
            key=wanted[0].split()[0],
        )
