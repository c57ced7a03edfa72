"""The protocol of a TCP store's client and server: a greeting in which both prove the token, then frames.

::

    greeting: client  "TORSHKV1" | client nonce (16)
              server  "TORSHKV1" | server nonce (16) | HMAC-SHA256(token, "server" + nonces)
              client  HMAC-SHA256(token, "client" + nonces)
    frame   = length (8) | field*            field = length (8, -1 for None) | bytes

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
# Two values of a compare-and-swap, and space for names.
MAX_FRAME_BYTES = 2 * MAX_VALUE_BYTES + 2**24
FRAME_HEADER = struct.Struct("!Q")
_FIELD_HEADER = struct.Struct("!q")

TcpField = bytes | None


def proof(token: str | None, side: str, nonces: bytes) -> bytes:
    """What `side` sends to show that it has the token."""
    return hmac.digest((token or "").encode(), side.encode() + nonces, "sha256")


def encode(fields: Sequence[TcpField]) -> bytes:
    """One frame."""
    pieces = [b""]
    for field in fields:
        pieces.append(_FIELD_HEADER.pack(-1 if field is None else len(field)))
        pieces.append(field or b"")
    pieces[0] = FRAME_HEADER.pack(sum(map(len, pieces)))
    return b"".join(pieces)


def decode(body: bytes | bytearray) -> list[TcpField]:
    """The fields of a frame without its header; ValueError if it is malformed."""
    fields: list[TcpField] = []
    view = memoryview(body)
    while view:
        if len(view) < _FIELD_HEADER.size:
            raise ValueError("a frame ends within a field's length")
        (num_bytes,) = _FIELD_HEADER.unpack_from(view)
        view = view[_FIELD_HEADER.size :]
        if not -1 <= num_bytes <= len(view):
            raise ValueError("a frame ends within a field")
        fields.append(None if num_bytes < 0 else bytes(view[:num_bytes]))
        view = view[max(0, num_bytes) :]
    return fields


def number(value: float | None) -> TcpField:
    """A number as a field: its shortest exact decimal form."""
    return None if value is None else repr(value).encode()
