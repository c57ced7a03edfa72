"""Lossless packing of float32 for a slow link between two nodes, where both ends agree on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torsh_distributed import events
from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.errors import TensorShapeMismatch

_NUM_TIMED = 3  # all-reduces; the first ones also pay for new memory and for TCP's slow start
_SLOW_BYTES_PER_S = 130e6
"""Of one connection. Below this, packing saves more on the link than it costs; decision 0013 has the figures."""
_LEAST_BYTES = 64 * 1024  # smaller messages are latency


class Packing:
    """One end of a connection between two nodes; packs its messages if the link is slow.

    Why measured: a backend does not know how fast a link is, and on a fast one packing costs more than it saves. Both
    ends must reach the same decision, so they exchange their measurements once.
    """

    def __init__(self, native: Any | None) -> None:
        """`native`: the compiled core, without which nothing is packed. Any: see `load_native`."""
        self._native: Any = native
        self._num_left = _NUM_TIMED
        self._bytes_per_s = 0.0
        self._is_on = False

    def packs(self, buffer: Tensor) -> bool:
        """Whether this buffer is sent packed; the same at both ends."""
        return self._is_on and buffer.dtype is torch.float32 and buffer.nbytes >= _LEAST_BYTES

    def timed(self, num_bytes: int, spent_s: float) -> bool:
        """Record a large all-reduce. True once, after the same one at both ends: then they `agree`."""
        if not self._num_left:
            return False
        self._num_left -= 1
        self._bytes_per_s = max(self._bytes_per_s, num_bytes / spent_s)
        return self._num_left == 0

    def seen(self) -> Tensor:
        """What this end sends to the other: its best rate and the version of its compiled core."""
        version = 0 if self._native is None else self._native.VERSION
        return torch.tensor([self._bytes_per_s, version], dtype=torch.float64)

    def agree(self, theirs: Tensor) -> None:
        """Decide from the measurements of both ends.

        The better rate counts: the end that arrived first has also timed its wait for the other.
        """
        (rate, version), (their_rate, their_version) = self.seen().tolist(), theirs.tolist()
        rate = max(rate, their_rate)
        self._is_on = rate < _SLOW_BYTES_PER_S and 0 < version == their_version
        reason = f"the best rate measured was {rate / 1e6:.0f} MB/s"
        if version != their_version or not version:
            reason += ", and the two nodes do not have the same compiled core"
        events.emit(
            events.DecisionEvent(subject="packing between nodes", choice="on" if self._is_on else "off", reason=reason)
        )

    def pack(self, buffer: Tensor) -> Tensor:
        """The packed message of a buffer that it `packs`; `unpack` restores the same floats."""
        message = self.room_for(buffer)
        return message[: self._native.pack(buffer.data_ptr(), buffer.numel(), message.data_ptr())]

    def room_for(self, buffer: Tensor) -> Tensor:
        """Memory for the largest message with as many floats; the one received may be shorter."""
        return torch.empty(self._native.packed_room(buffer.numel()), dtype=torch.uint8)

    def unpack(self, message: Tensor, like: Tensor, call: Call) -> Tensor:
        """The floats of a message; raises if their number differs from that of `like`."""
        values = torch.empty_like(like)
        if not self._native.unpack(message.data_ptr(), values.numel(), values.data_ptr()):
            raise TensorShapeMismatch(
                f"{call.operation} number {call.sequence} has another size on the other node",
                hint="every rank must call it with a tensor of the same size",
                operation=call.operation,
                sequence=call.sequence,
                backend="torsh",
            )
        return values
