"""How a TCP store's client and server talk: a greeting in which both prove the token, then frames.

::

    greeting: client  "TORSHKV1" | client nonce (16)
              server  "TORSHKV1" | server nonce (16) | HMAC-SHA256(token, "server" + nonces)
              client  HMAC-SHA256(token, "client" + nonces)
    frame   = length (8) | part*            part = length (8, -1 for None) | bytes

The token itself never travels and nothing is unpickled. Without a token both use the empty one. What follows the
greeting is neither encrypted nor signed: on a network that others can write to, tunnel it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

from torsh_distributed.comm.store.keyspace import MAX_VALUE_BYTES

MAGIC = b"TORSHKV1"
NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
# Two values of a compare-and-swap, and room for names.
MAX_FRAME_BYTES = 2 * MAX_VALUE_BYTES + 2**24
FRAME_HEADER = struct.Struct("!Q")
_PART_HEADER = struct.Struct("!q")

Part = bytes | None


def proof(token: str | None, side: str, nonces: bytes) -> bytes:
    """What `side` sends to show that it has the token."""
    return hmac.digest((token or "").encode(), side.encode() + nonces, "sha256")


def encode(parts: Sequence[Part]) -> bytes:
    """One frame."""
    pieces = [b""]
    for part in parts:
        pieces.append(_PART_HEADER.pack(-1 if part is None else len(part)))
        pieces.append(part or b"")
    pieces[0] = FRAME_HEADER.pack(sum(map(len, pieces)))
    return b"".join(pieces)


def decode(body: bytes | bytearray) -> list[Part]:
    """The parts of a frame without its header; ValueError if it is malformed."""
    parts: list[Part] = []
    view = memoryview(body)
    while view:
        if len(view) < _PART_HEADER.size:
            raise ValueError("a frame ends within a part's length")
        (num_bytes,) = _PART_HEADER.unpack_from(view)
        view = view[_PART_HEADER.size :]
        if not -1 <= num_bytes <= len(view):
            raise ValueError("a frame ends within a part")
        parts.append(None if num_bytes < 0 else bytes(view[:num_bytes]))
        view = view[max(0, num_bytes) :]
    return parts


def number(value: float | None) -> Part:
    """A number as a part: its shortest exact decimal form."""
    return None if value is None else repr(value).encode()
