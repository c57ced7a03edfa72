"""What travels on a connection once both ends have proved the job's secret.

::

    frame = bytes of the head (4) | of the payload (8) | head | signature (32) | payload | signature (32)

Signatures are there on signed connections alone, the second only with a payload. Why two: the head says where the
payload goes, so it is checked before it is believed, and the payload can be received where it stays.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from torsh_distributed.comm.trust.handshake import MAC_BYTES, NotAMember, Signer

Buffer = bytes | bytearray | memoryview
_LENGTHS = struct.Struct("!IQ")
LENGTHS_BYTES = _LENGTHS.size


class BadFrame(ConnectionAbortedError):
    """What arrived is not a frame of a member of the job. The connection is of no use any more: close it."""


class FrameLimits(NamedTuple):
    """The most that a frame may have: checked before memory is taken for it."""

    head_bytes: int
    payload_bytes: int = 0


class Frames:
    """Seals and checks the frames of one end of a connection, each direction in its order."""

    def __init__(self, signers: tuple[Signer, Signer] | None, limits: FrameLimits) -> None:
        self._sending: Signer | None = None if signers is None else signers[0]
        self._receiving: Signer | None = None if signers is None else signers[1]
        self._most_head_bytes, self._most_payload_bytes = limits
        self.signature_bytes = 0 if signers is None else MAC_BYTES

    def seal(self, head: Buffer, parts: Sequence[Buffer] = ()) -> list[Buffer]:
        """What to send, in order. The parts of the payload are not copied. BadFrame if a frame may not be that long."""
        views = [view for part in parts if (view := memoryview(part).cast("B"))]
        sealed: list[Buffer] = [self.seal_head(head, sum(map(len, views))), *views]
        return sealed if self._sending is None or not views else [*sealed, self._sending.sign(*views)]

    def seal_head(self, head: Buffer, num_payload: int = 0) -> bytes:
        """The part of a frame before its payload. BadFrame if a frame may not be that long."""
        num_head = len(head)
        if num_head > self._most_head_bytes or num_payload > self._most_payload_bytes:
            raise self._too_long(num_head, num_payload)
        lengths = _LENGTHS.pack(num_head, num_payload)
        return lengths + head if self._sending is None else lengths + head + self._sending.sign(lengths, head)

    def lengths(self, prefix: Buffer, start: int = 0) -> tuple[int, int]:
        """The bytes of head and payload that a frame's first bytes announce, from `start`. BadFrame if too many."""
        num_head, num_payload = _LENGTHS.unpack_from(prefix, start)
        if num_head > self._most_head_bytes or num_payload > self._most_payload_bytes:
            raise self._too_long(num_head, num_payload)
        return num_head, num_payload

    def check_head(self, prefix: Buffer, head: Buffer, signature: Buffer) -> None:
        """Raise BadFrame unless this is the next head and its signature."""
        self._check(signature, prefix, head)

    def check_payload(self, signature: Buffer, *parts: Buffer) -> None:
        """Raise BadFrame unless these are the parts of the payload that belongs to the last head."""
        self._check(signature, *parts)

    def _check(self, signature: Buffer, *parts: Buffer) -> None:
        if self._receiving is None:
            return
        try:
            self._receiving.check(signature, *parts)
        except NotAMember as error:
            raise BadFrame(str(error)) from error

    def _too_long(self, num_head: int, num_payload: int) -> BadFrame:
        return BadFrame(
            f"a message of {num_head} + {num_payload} bytes is longer than the {self._most_head_bytes} + "
            f"{self._most_payload_bytes} that are allowed here"
        )
