"""What devices and server say to each other, over TLS: a plain head and, for models and updates, a payload.

::

    server   ["hello", nonce]
    device   ["enrol" | "join", name, public key, token's secret or b"", model's fingerprint, metered, signature]
    server   ["welcome", beat_s, expire_s] | ["refused", reason]
    server   ["work", nonce, counted] + order       device   ["update", nonce, signature] + update
    server   ["roster" | …, nonce] + what it says   device   ["sum", nonce, signature] + its answer
    server   ["end"]                                device   ["failed", nonce, reason]
    both     ["alive"]

A device signs the server's nonce together with the server's certificate, so its answer is of no use anywhere else. An
update is signed with the nonce of the work that it answers: it counts once, for that work. `counted` is the nonce of
the device's last update that is part of the model: what the device remembers is what it had after that one. With secure
aggregation the answer to work is "sum" with the device's keys, and the steps of `sum_member` follow.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from typing import Any

from torch import Tensor

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.comm.transport.frames import BadFrame, FrameLimits
from torsh_distributed.comm.transport.proof import ProvedSocket
from torsh_distributed.errors import SerializationError
from torsh_distributed.federated.local_training import ClientUpdate

HEAD_BYTES = 1 << 14
_UPDATE_FIELDS = {
    "client": str,
    "round": int,
    "num_samples": int,
    "num_steps": int,
    "step_norm": float,
    "figures": dict,
    "duration_s": float,
}


def over_tls(sock: ssl.SSLSocket, most_payload_bytes: int, timeout_s: float) -> Connection:
    """A connection for messages; TLS protects it, so frames are not signed again."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limits = FrameLimits(head_bytes=HEAD_BYTES, payload_bytes=most_payload_bytes)
    return Connection(ProvedSocket(sock, None), limits, timeout_s)


def joining_message(kind: str, nonce: bytes, server_digest: bytes, name: str, fingerprint: str) -> bytes:
    """What a device signs to join."""
    return b"\0".join([b"torsh-federated-1", kind.encode(), nonce, server_digest, name.encode(), fingerprint.encode()])


def update_message(nonce: bytes, payload: bytes | memoryview) -> bytes:
    """What a device signs of an update."""
    return b"torsh-federated-update-1" + nonce + hashlib.sha256(payload).digest()


def pack_update(update: ClientUpdate) -> bytes:
    """An update as bytes."""
    plain = {name: getattr(update, name) for name in _UPDATE_FIELDS}
    delta = update.delta if update.message is None else update.message
    return serialize({**plain, "delta": delta, "extras": update.extras})


def open_update(payload: bytes | memoryview) -> ClientUpdate:
    """The update in a payload; SerializationError if it is not one."""
    fields = deserialize(bytes(payload))
    if not isinstance(fields, dict) or set(fields) != {*_UPDATE_FIELDS, "delta", "extras"}:
        raise SerializationError("a payload that is not an update")
    for name, kind in _UPDATE_FIELDS.items():
        if type(fields[name]) is not kind:
            raise SerializationError(f"an update whose {name} is no {kind.__name__}")
    if not all(isinstance(key, str) and type(value) is float for key, value in fields["figures"].items()):
        raise SerializationError("an update whose figures are not numbers")
    if not isinstance(fields["extras"], dict):
        raise SerializationError("an update whose extras are not a dict")
    if not all(isinstance(vector, Tensor) for vector in (fields["delta"], *fields["extras"].values())):
        raise SerializationError("an update with vectors that are not tensors")
    return ClientUpdate(**fields)


def checked_head(head: Any, *kinds: type) -> list[Any]:
    """The parts of a message behind its name; BadFrame if they are others."""
    if not isinstance(head, list) or len(head) != len(kinds) + 1:
        raise BadFrame("a message with other parts than expected")
    if any(type(part) is not kind for part, kind in zip(head[1:], kinds, strict=True)):
        raise BadFrame("a message with a part of another type")
    return head[1:]
