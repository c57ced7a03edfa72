"""Strangers against jobs: nothing is read, written, joined or ended, and nobody waits a second for it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.attacks import attacker
from tests.attacks.victim import NOBODY, Verdict, victim
from tests.lab.network import Lab

pytestmark = [pytest.mark.needs_netns, pytest.mark.ranks]

MOST_PAUSE_S = 1.0


def check(verdict: Verdict) -> None:
    assert verdict.reads == []
    assert verdict.num_writes == 0
    assert verdict.num_joins == 0
    assert verdict.num_kills == 0, verdict.output
    assert verdict.longest_pause_s < MOST_PAUSE_S
    assert verdict.num_warnings <= 6, verdict.output


def test_there_are_at_least_forty_distinct_attempts() -> None:
    assert sum(map(len, attacker.ATTEMPTS.values())) >= 40


def test_another_user_gets_nothing_from_a_job_on_his_machine(tmp_path: Path) -> None:
    with victim(tmp_path) as job:
        job.start_node(0)
        job.wait_ready()
        attempts = job.attack(["user", "port"])
        verdict = job.finish(attempts)
    assert len(attempts) == sum(map(len, attacker.ATTEMPTS.values()))
    check(verdict)


@pytest.mark.matrix
@pytest.mark.parametrize("options", [[], ["--tls"]], ids=["signed", "tls"])
def test_another_host_and_another_user_get_nothing_from_a_job_on_two_nodes(
    lab: Lab, tmp_path: Path, options: list[str]
) -> None:
    first, second, stranger = lab.hosts(3)
    with victim(tmp_path, hosts=[first, second], nproc_per_node=1) as job:
        job.start_node(0, *options)
        job.start_node(1, *options)
        job.wait_ready()
        attempts = [*job.attack(["port"], stranger), *job.attack(["user", "port"], second)]
        verdict = job.finish(attempts)
    check(verdict)


FLOOD = """
import encodings.idna, os, socket, sys, time
os.setgroups([]); os.setgid(int(sys.argv[4])); os.setuid(int(sys.argv[3]))
held = []
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    while len(held) < 200:
        held.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5))
    print("held", flush=True)
    time.sleep(0.2)
    alive = []
    for sock in held:
        sock.setblocking(False)
        try:
            if sock.recv(1) == b"":
                sock.close()
                continue
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            continue
        alive.append(sock)
    held = alive
"""


def test_idle_strangers_do_not_keep_a_node_out(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts(2)
    with victim(tmp_path, hosts=[first, second], nproc_per_node=1) as job:
        job.start_node(0)
        wait_for_port(first.address, job.master_port, lab)
        arguments = [first.address, str(job.master_port), str(NOBODY.pw_uid), str(NOBODY.pw_gid)]
        # From the second node's own address, so the pool cannot tell the stranger from the member by it.
        flood = second.popen([sys.executable, "-I", "-S", "-c", FLOOD, *arguments], stdout=subprocess.PIPE)
        assert flood.stdout is not None
        assert flood.stdout.readline() == "held\n"
        job.start_node(1)
        job.wait_ready()
        flood.kill()
        verdict = job.finish([])
    assert verdict.exit_codes == [0, 0], verdict.output
    assert verdict.num_warnings <= 4, verdict.output


def wait_for_port(address: str, port: int, lab: Lab) -> None:
    probe = f"import socket; socket.create_connection(({address!r}, {port}), 2).close()"
    deadline = time.monotonic() + 30
    while lab.host(0).run([sys.executable, "-I", "-S", "-c", probe], check=False).returncode:
        assert time.monotonic() < deadline, "the launcher does not listen"
