"""DDP's buckets in memory that the ranks of a node share: averaging them copies nothing in or out.

DDP builds its buckets itself, first in the order of parameters, then again in the order of gradients. A bucket seen a
second time is final: its memory is replaced by shared memory, and its views stay valid.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.wire import SharedBuffer
from torsh_distributed.comm.shared_memory.buffers import share_buffer

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
