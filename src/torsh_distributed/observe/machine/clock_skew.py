"""How far apart the clocks of two machines are: a few datagrams there and back, as NTP does it.

Timestamps of events, traces and logs of several nodes are compared; a clock that is a second off makes causes come
after their consequences.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from torsh_distributed.errors import OperationTimeout
from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult

_MAGIC = b"TORSHCLK"
# Request and reply have one size, so the reply is of no use for flooding somebody else.
_PACKET = struct.Struct("<8sIddd")
_ROUNDS = 8
_WAIT_S = 0.5
_WORTH_A_WARNING_S = 0.05
_WRONG_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ClockSkew:
    """The other machine's clock, relative to this one."""

    skew_s: float
    """Above zero if the other clock is ahead."""
    error_s: float
    """Half the fastest round trip: the skew is known to this."""
    round_trip_s: float


def serve_clock(sock: socket.socket, *, num_packets: int | None = None) -> int:
    """Answer with the time of this machine, `num_packets` times or until the socket times out; returns how often."""
    answered = 0
    while num_packets is None or answered < num_packets:
        try:
            data, asker = sock.recvfrom(_PACKET.size + 1)
        except TimeoutError:
            break
        received_s = time.time()
        if len(data) == _PACKET.size and data.startswith(_MAGIC):
            _, number, sent_s, _, _ = _PACKET.unpack(data)
            sock.sendto(_PACKET.pack(_MAGIC, number, sent_s, received_s, time.time()), asker)
            answered += 1
    return answered


def measure_skew(host: str, port: int) -> ClockSkew:
    """Ask the machine that runs `torsh doctor --serve-clock`; the fastest of a few round trips counts."""
    best: ClockSkew | None = None
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.settimeout(_WAIT_S)
        sock.connect(address)
        for number in range(_ROUNDS):
            found = _ask(sock, number)
            if found is not None and (best is None or found.round_trip_s < best.round_trip_s):
                best = found
    if best is None:
        raise OperationTimeout(
            f"{host}:{port} does not answer",
            hint=f"run `torsh doctor --serve-clock {host}:{port}` there; a firewall may drop UDP",
            operation="clock",
        )
    return best


def _ask(sock: socket.socket, number: int) -> ClockSkew | None:
    sent_s = time.time()
    try:
        sock.send(_PACKET.pack(_MAGIC, number, sent_s, 0.0, 0.0))
        while True:
            data = sock.recv(_PACKET.size + 1)
            if len(data) == _PACKET.size:
                magic, answered, echoed_s, received_s, replied_s = _PACKET.unpack(data)
                if (magic, answered, echoed_s) == (_MAGIC, number, sent_s):
                    break
    except OSError:  # no answer, or nobody listens
        return None
    back_s = time.time()
    trip_s = (back_s - sent_s) - (replied_s - received_s)
    skew_s = ((received_s - sent_s) + (replied_s - back_s)) / 2
    return ClockSkew(skew_s=skew_s, error_s=trip_s / 2, round_trip_s=trip_s)


def check_clock(host: str, port: int) -> DiagnosticResult:
    """The skew to another machine, as a finding."""
    try:
        found = measure_skew(host, port)
    except (OperationTimeout, OSError) as error:
        return DiagnosticResult(
            check_name="clock",
            severity=CheckSeverity.ERROR,
            description=f"{host}:{port}: {getattr(error, 'message', error)}",
            reason="the nodes cannot be compared",
            remediation=f"run `torsh doctor --serve-clock {host}:{port}` there; a firewall may drop UDP",
        )
    off_s = abs(found.skew_s)
    severity = (
        CheckSeverity.OK
        if off_s < _WORTH_A_WARNING_S
        else CheckSeverity.WARNING
        if off_s < _WRONG_S
        else CheckSeverity.ERROR
    )
    direction = "ahead" if found.skew_s > 0 else "behind"
    return DiagnosticResult(
        check_name="clock",
        severity=severity,
        description=f"{host} is {off_s * 1e3:.2f} ms {direction} (±{found.error_s * 1e3:.2f} ms)",
        reason="" if severity is CheckSeverity.OK else "logs, events and traces of the two nodes do not line up",
        remediation="" if severity is CheckSeverity.OK else "run an NTP client (chrony, systemd-timesyncd) on both",
        data={"skew_s": found.skew_s, "error_s": found.error_s, "round_trip_s": found.round_trip_s},
    )
