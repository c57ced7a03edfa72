"""What a TCP store's client and server say to each other after the handshake.

::

    frame   = length of the body (4) | signature (32, only on signed connections) | body
    request = "s" key length (4) key value       write the key; there is no reply
            | "g" key                            read the key now
            | "a" number (8) key                 add to the counter
            | "c" key                            is the key there?
            | "f" fields: operation, arguments   anything else
    reply   = "+" value or fields | "-" no such key | "!" an error as JSON
    fields  = (length (8, -1 for None) | bytes)*

Nothing is unpickled. A write has no reply, as in torch's TCPStore: it costs no round trip, and what the same client
asks next is answered after it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torsh_distributed.comm.store.keyspace import MAX_VALUE_BYTES
from torsh_distributed.comm.trust.handshake import Signer

MAGIC = b"TORSHKV2"
# Two values of a compare-and-swap, and space for names.
MAX_FRAME_BYTES = 2 * MAX_VALUE_BYTES + 2**24
FRAME_HEADER = struct.Struct("!I")
KEY_HEADER = struct.Struct("!cI")
_FIELD_HEADER = struct.Struct("!q")
ADD_HEADER = struct.Struct("!cq")

SET, GET, ADD, CHECK, FIELDS = b"s", b"g", b"a", b"c", b"f"
DONE, MISSING, INVALID = b"+", b"-", b"!"

TcpField = bytes | None


def frame(body: bytes, signer: Signer | None = None) -> bytes:
    """The body as it travels."""
    if signer is None:
        return FRAME_HEADER.pack(len(body)) + body
    return FRAME_HEADER.pack(len(body)) + signer.sign(body) + body


def encode(fields: Sequence[TcpField]) -> bytes:
    """Fields as one body."""
    pieces: list[bytes] = []
    for field in fields:
        pieces.append(_FIELD_HEADER.pack(-1 if field is None else len(field)))
        pieces.append(field or b"")
    return b"".join(pieces)


def decode(body: bytes | bytearray) -> list[TcpField]:
    """The fields of a body; ValueError if it is malformed."""
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
