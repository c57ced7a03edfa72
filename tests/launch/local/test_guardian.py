from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torsh_distributed.launch.local.guardian import MARK_VARIABLE, Guardian, find_members, kill_members, kill_session

pytestmark = pytest.mark.ranks

# Prints the pid of a grandchild, then both wait for ever.
FAMILY = """
import os, signal, sys
if os.fork() == 0:
    {grandchild}
    print(os.getpid(), flush=True)
signal.pause()
"""


def wait_gone(pidfd: int, timeout_s: float = 10) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


class Family:
    """A process that leads a session, with one child of its own, as a worker with a data loader."""

    def __init__(self, mark: str, grandchild: str = "pass") -> None:
        self.leader = subprocess.Popen(
            [sys.executable, "-S", "-c", FAMILY.format(grandchild=grandchild)],
            env={**os.environ, MARK_VARIABLE: f"outer:{mark}"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.child = int(self.leader.stdout.readline())
        self.pidfds = [os.pidfd_open(self.leader.pid), os.pidfd_open(self.child)]

    def are_gone(self) -> bool:
        return all(wait_gone(pidfd) for pidfd in self.pidfds)

    def close(self) -> None:
        for pid, pidfd in zip((self.leader.pid, self.child), self.pidfds, strict=True):
            if not wait_gone(pidfd, 0):
                os.kill(pid, signal.SIGKILL)
            os.close(pidfd)
        self.leader.wait(timeout=10)
        self.leader.stdout.close()


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def family(mark: str) -> Iterator[Family]:
    made = Family(mark)
    yield made
    made.close()


def test_members_are_found_by_session_and_by_mark(family: Family, mark: str) -> None:
    everyone = {family.leader.pid, family.child}
    assert set(find_members(mark, [])) == everyone
    assert set(find_members("another-mark", [family.leader.pid])) == everyone
    assert find_members("another-mark", []) == {}
    assert find_members(mark[:-1], []) == {}


def test_killing_ends_grandchildren_too(family: Family, mark: str) -> None:
    ended, remaining = kill_members(mark, [], timeout_s=10)
    assert set(ended) == {family.leader.pid, family.child}
    assert remaining == {}
    assert family.are_gone()
    assert kill_members(mark, [], timeout_s=10) == ({}, {})


def test_a_child_that_left_the_session_is_found_by_the_mark(mark: str) -> None:
    runaway = Family(mark, grandchild="os.setsid()")
    try:
        assert os.getsid(runaway.child) == runaway.child
        kill_members(mark, [runaway.leader.pid], timeout_s=10)
        assert runaway.are_gone()
    finally:
        runaway.close()


def test_the_guardian_ends_everything_when_the_launcher_vanishes(family: Family, mark: str, tmp_path: Path) -> None:
    leftover = tmp_path / "leftover"
    leftover.mkdir()
    (leftover / "file").touch()
    pid = os.fork()
    if pid == 0:
        guardian = Guardian(mark)
        guardian.watch_session(family.leader.pid)
        guardian.remove_directory(leftover)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert family.are_gone()
    for _ in range(1000):
        if not leftover.exists():
            break
        select.select([], [], [], 0.01)
    assert not leftover.exists()


def test_a_dismissed_guardian_harms_nobody(family: Family, mark: str) -> None:
    guardian = Guardian(mark)
    guardian.watch_session(family.leader.pid)
    guardian.close()
    assert not wait_gone(family.pidfds[0], 0)
    assert not wait_gone(family.pidfds[1], 0)


def test_a_killed_guardian_is_replaced_and_told_again(family: Family, mark: str) -> None:
    pid = os.fork()
    if pid == 0:
        guardian = Guardian("another-mark")
        guardian.watch_session(family.leader.pid)
        os.kill(guardian.pid, signal.SIGKILL)
        wait_gone(guardian.pidfd)
        guardian.remove_directory(Path("/nonexistent"))
        guardian.revive()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert family.are_gone()


def test_ctrl_c_before_a_helper_has_its_session_does_not_end_it(mark: str) -> None:
    guardian = Guardian(mark)
    try:
        status = Path(f"/proc/{guardian.pid}/status").read_text()
        (blocked,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
        assert int(blocked, 16) & 1 << signal.SIGINT - 1
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        guardian.close()


@pytest.mark.parametrize("ends", ["members", "session first"])
def test_semaphores_of_killed_processes_are_gone(mark: str, ends: str) -> None:
    script = """
import multiprocessing, signal
made = [multiprocessing.get_context("spawn").Semaphore() for _ in range(3)]
print(*(one._semlock.name for one in made), flush=True)
signal.pause()
"""
    leader = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, MARK_VARIABLE: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    files = [Path("/dev/shm") / f"sem.{name.removeprefix('/')}" for name in leader.stdout.readline().split()]
    assert [file.exists() for file in files] == [True] * 3
    if ends == "session first":
        kill_session(leader.pid)
    _, remaining = kill_members(mark, [leader.pid], timeout_s=10)
    leader.wait(timeout=10)
    leader.stdout.close()
    assert remaining == {}
    assert [file.exists() for file in files] == [False] * 3
