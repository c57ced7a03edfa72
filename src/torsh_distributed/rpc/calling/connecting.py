"""How a caller reaches a callee: two lanes, each proved by the job's secret; and where a callee listens."""

from __future__ import annotations

import os
import secrets
import socket

from torsh_distributed.comm.meeting.network_interface import listening_address
from torsh_distributed.comm.transport.connection import Connection, open_socket
from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.comm.transport.frames import FrameLimits
from torsh_distributed.comm.transport.proof import prove, tls_beyond
from torsh_distributed.comm.trust.job_secret import is_loopback_address
from torsh_distributed.errors import CommunicationError, TorshError
from torsh_distributed.rpc.directory import WorkerInfo
from torsh_distributed.rpc.messages.lane_pair import (
    HELLO,
    LANE_NAMES,
    PROTOCOL,
    LanePair,
)

_CONNECT_S = 10.0
_HELLO_LIMITS = FrameLimits(head_bytes=1 << 12)


def open_lanes(callee: WorkerInfo, secret: bytes, caller: str, loop: EventLoop, *, most_payload_bytes: int) -> LanePair:
    """Connect to a worker. CommunicationError if it cannot be reached or does not have the secret."""
    key = secrets.token_hex(16)
    pair = LanePair(most_payload_bytes)
    try:
        for name in LANE_NAMES:
            sock = open_socket(callee.address, _CONNECT_S)
            proved = prove(sock, secret, PROTOCOL, is_server=False, timeout_s=_CONNECT_S, tls=tls_beyond(sock))
            Connection(proved, _HELLO_LIMITS, _CONNECT_S).send([HELLO, key, name, caller])
            pair.add(proved, name, loop)
    except OSError as error:
        pair.close()
        if isinstance(error, TorshError):
            raise
        raise CommunicationError(
            f"worker {callee.name!r} cannot be reached: {error}",
            hint="it may have ended; look at its output, and whether its node can be reached from here",
            worker=callee.name,
            address=str(callee.address),
        ) from error
    return pair


def listen_on_network(host: str | None) -> socket.socket | None:
    """A port for callers on other nodes; None where the job stays on this one."""
    if host is None:
        host = listening_address(os.environ)
        if is_loopback_address(host):
            return None
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
