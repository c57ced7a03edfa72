"""The network lab: hosts reach each other, limits hold, cut links stop traffic, counters count, nothing is left."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.network import MAX_HOSTS, Host, Lab, LabError, leftovers, remove_leftovers

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]

# Listens, says so, then reads one connection to its end and reports how many bytes arrived in which time.
SINK = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    server.settimeout(20)
    conn, peer = server.accept()
    conn.settimeout(20)
    start, total = time.monotonic(), 0
    while piece := conn.recv(1 << 20):
        total += len(piece)
    print(peer[0], total, time.monotonic() - start, flush=True)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=5) as sock:
    sock.settimeout(20)
    sock.sendall(bytes(int(sys.argv[2])))
"""


def transfer(source: Host, sink: Host, num_bytes: int) -> tuple[str, int, float]:
    """Send over TCP; returns the sender's address as seen by the receiver, the bytes, the seconds."""
    receiver = sink.popen([sys.executable, "-c", SINK, sink.address], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    source.run([sys.executable, "-c", SOURCE, sink.address, str(num_bytes)])
    peer, received, seconds = receiver.stdout.readline().split()
    return peer, int(received), float(seconds)


def reaches(source: Host, sink: Host, *, within_s: float = 15.0) -> bool:
    """Whether a connection attempt gets an answer (a refusal, because nothing listens)."""
    knock = """if True:
        import errno, socket, sys
        with socket.socket() as sock:
            sock.settimeout(float(sys.argv[2]))
            sys.exit(0 if sock.connect_ex((sys.argv[1], 1)) == errno.ECONNREFUSED else 1)
    """
    return source.run([sys.executable, "-c", knock, sink.address, str(within_s)], check=False).returncode == 0


def test_hosts_reach_each_other_and_nothing_else(lab: Lab) -> None:
    a, b = lab.hosts(2)
    assert transfer(a, b, 1000)[:2] == (a.address, 1000)
    assert transfer(b, a, 1000)[:2] == (b.address, 1000)
    routes = a.run(["ip", "route"]).stdout.splitlines()
    assert len(routes) == 1
    assert routes[0].startswith("10.111.0.0/24 dev eth0")


def test_a_host_has_a_name_that_the_others_resolve(lab: Lab) -> None:
    a, b = lab.hosts(2)
    ask = "import socket; print(socket.gethostname(), socket.gethostbyname('node1'))"
    assert a.run([sys.executable, "-c", ask]).stdout.split() == ["node0", b.address]
    assert b.run([sys.executable, "-c", ask]).stdout.split() == ["node1", b.address]
    assert socket.gethostname() not in ("node0", "node1")


def test_two_labs_at_once_do_not_meet(lab: Lab) -> None:
    with Lab() as other:
        mine, theirs = lab.hosts(2)[0], other.hosts(2)[1]
        listener = theirs.popen([sys.executable, "-c", SINK, theirs.address], stdout=subprocess.PIPE)
        assert listener.stdout is not None
        listener.stdout.readline()
        with pytest.raises(LabError, match="ConnectionRefusedError"):
            mine.run([sys.executable, "-c", SOURCE, theirs.address, "1"])


def test_counters_count_what_was_sent(lab: Lab) -> None:
    a, b, bystander = lab.hosts(3)
    before = [host.counters() for host in (a, b, bystander)]
    transfer(a, b, 4_000_000)
    sender, receiver, idle = (
        host.counters() - earlier for host, earlier in zip((a, b, bystander), before, strict=True)
    )
    assert 4_000_000 < sender.tx_bytes < 4_400_000
    assert 4_000_000 < receiver.rx_bytes < 4_400_000
    assert sender.rx_bytes < 400_000
    assert idle.rx_bytes < 10_000


def test_a_limit_holds_for_a_real_transfer(lab: Lab) -> None:
    a, b = lab.hosts(2)
    a.limit(0.05)
    _, _, limited_s = transfer(a, b, 4_000_000)
    # 4 MB at 50 Mbit/s need 0.64 s; only a lower bound is safe to assert on a busy machine.
    assert limited_s > 0.5
    assert "tbf" in a.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    a.limit(None)
    assert "tbf" not in a.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout


def test_a_limit_holds_in_the_other_direction_too(lab: Lab) -> None:
    a, b = lab.hosts(2)
    a.limit(0.05)
    assert transfer(b, a, 4_000_000)[2] > 0.5


def test_a_pulled_cable_cuts_one_host_off_until_it_is_back(lab: Lab) -> None:
    a, b, c = lab.hosts(3)
    a.link_down()
    assert not reaches(a, b, within_s=0.5)
    assert not reaches(b, a, within_s=0.5)
    assert reaches(b, c)
    a.link_up()
    assert reaches(a, b)


def test_a_partition_separates_the_sides_and_heals(lab: Lab) -> None:
    a, b, c, d = lab.hosts(4)
    lab.partition([a, b], [c, d])
    assert reaches(a, b)
    assert reaches(c, d)
    assert not reaches(a, c, within_s=0.5)
    assert not reaches(d, b, within_s=0.5)
    lab.heal()
    assert reaches(a, c)


def test_a_failing_command_says_where_and_why(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"(?s)on host 0 exited with 3:.*no such luck"):
        lab.host(0).run([sys.executable, "-c", "import sys; print('no such luck'); sys.exit(3)"])


def test_the_number_of_hosts_is_bounded(lab: Lab) -> None:
    with pytest.raises(LabError, match=f"hosts 0 to {MAX_HOSTS - 1}"):
        lab.host(MAX_HOSTS)


def test_closing_kills_what_still_runs_grandchildren_included(lab: Lab) -> None:
    with Lab() as other:
        spawn = "import subprocess as s; p = s.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
        process = other.host(0).popen([sys.executable, "-c", spawn], stdout=subprocess.PIPE)
        assert process.stdout is not None
        grandchild = os.pidfd_open(int(process.stdout.readline()))
        assert not select.select([grandchild], [], [], 0)[0], "it runs"
        namespace = other.host(0).namespace
    assert process.returncode == -signal.SIGKILL
    # Killed before the namespace was deleted, though the kernel may take a moment; readable means that it has ended.
    assert select.select([grandchild], [], [], 10)[0]
    os.close(grandchild)
    assert not Path("/run/netns", namespace).exists()


@pytest.mark.needs_netns
def test_what_a_killed_process_left_is_removed_by_the_next_lab() -> None:
    build = (
        "import os, signal, subprocess; from tests.lab.network import Lab\n"
        "host = Lab().host(0)\n"
        "host.popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(host.namespace, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True, timeout=60)
    namespace = died.stdout.strip()
    assert died.returncode == -signal.SIGKILL
    # Another test process may have started a lab and cleaned up in the meantime: leftovers() may no longer name it.
    remove_leftovers()
    assert namespace not in leftovers()
    assert not Path("/run/netns", namespace).exists()
