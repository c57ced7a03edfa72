from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.launch.local.exit_causes import (
    ExitStatus,
    find_oom_counter,
    oom_evidence,
    peak_memory,
    peek_status,
)


@pytest.mark.parametrize(
    ("code", "words", "shell_code"),
    [
        (0, "exit code 0", 0),
        (3, "exit code 3", 3),
        (-9, "signal 9 (SIGKILL, killed)", 137),
        (-11, "signal 11 (SIGSEGV, segmentation fault: invalid memory access)", 139),
        (-6, "signal 6 (SIGABRT, aborted: a failed assertion or an uncaught C++ exception)", 134),
        (-15, "signal 15 (SIGTERM, terminated)", 143),
        (-21, "signal 21 (SIGTTIN, stopped (tty input))", 149),
        (-34, "signal 34", 162),
    ],
)
def test_an_ending_is_put_into_words(code: int, words: str, shell_code: int) -> None:
    status = ExitStatus(code)
    assert status.describe().startswith(words)
    assert status.shell_code == shell_code


def test_a_core_dump_is_mentioned() -> None:
    assert ExitStatus(-11, dumped_core=True).describe().endswith("core dumped)")


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)]
)
def test_a_childs_ending_is_seen_without_collecting_it(code: str, expected: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import sys; sys.stdin.read(); {code}"], stdin=subprocess.PIPE
    )
    pidfd = os.pidfd_open(child.pid)
    try:
        assert peek_status(pidfd) is None
        child.stdin.close()
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert peek_status(pidfd) == ExitStatus(expected)
        assert peek_status(pidfd) == ExitStatus(expected)
        assert child.wait(timeout=10) == expected
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("end", ["pass", "import os; os.kill(os.getpid(), 9)"], ids=["ends", "is killed"])
def test_the_most_memory_that_a_child_held_is_known_after_its_end(end: str) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", f"held = bytearray(b'x' * (200 << 20)); {end}"])
    pidfd = os.pidfd_open(child.pid)
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        held = peak_memory(pidfd)
        child.wait(timeout=10)
        assert held is not None
        # Until it runs its own program a child counts the memory of the process that started it.
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert 200 << 20 < held < max(1 << 30, own + (1 << 20))
        assert peak_memory(pidfd) is None, "reaped: the kernel has forgotten it"
    finally:
        os.close(pidfd)


def cgroup_files(tmp_path: Path, groups: str, mountinfo: str) -> tuple[Path, Path]:
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_text(mountinfo)
    return tmp_path, tmp_path / "mountinfo"


def test_the_counter_of_version_2_is_found(tmp_path: Path) -> None:
    group = tmp_path / "fs" / "job.slice" / "train.scope"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    files = cgroup_files(
        tmp_path, "0::/job.slice/train.scope\n", f"30 1 0:26 / {tmp_path}/fs rw,nosuid - cgroup2 cgroup2 rw\n"
    )
    counter = find_oom_counter(*files)
    assert counter is not None
    assert counter.read() == 2


def test_the_counter_of_version_1_is_found_beside_an_empty_version_2(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "docker" / "abc"
    group.mkdir(parents=True)
    (tmp_path / "unified").mkdir()
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    files = cgroup_files(
        tmp_path,
        "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        f"31 1 0:27 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
        f"32 1 0:28 / {tmp_path}/memory rw shared:9 - cgroup cgroup rw,memory\n",
    )
    counter = find_oom_counter(*files)
    assert counter is not None
    assert counter.read() == 7


def test_in_a_container_the_mount_shows_the_own_group_as_its_root(tmp_path: Path) -> None:
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs" / "memory.events").write_text("oom_kill 1\n")
    files = cgroup_files(tmp_path, "0::/docker/abc\n", f"30 1 0:26 /docker/abc {tmp_path}/fs rw - cgroup2 cgroup2 rw\n")
    counter = find_oom_counter(*files)
    assert counter is not None
    assert counter.path == tmp_path / "fs" / "memory.events"


def test_without_a_counter_nothing_is_claimed(tmp_path: Path) -> None:
    files = cgroup_files(tmp_path, "0::/\n", f"30 1 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw\n")
    assert find_oom_counter(*files, tmp_path / "no-vmstat") is None


def test_without_a_group_of_its_own_the_whole_machine_is_the_witness(tmp_path: Path) -> None:
    files = cgroup_files(tmp_path, "0::/\n", f"30 1 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw\n")
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 17\noom_kill 3\n")
    counter = find_oom_counter(*files, vmstat)
    assert counter is not None
    assert counter.read() == 3
    assert find_oom_counter(tmp_path / "absent", tmp_path / "absent", tmp_path / "absent") is None
    assert oom_evidence(None, 0) is None


def test_only_a_count_that_rose_is_evidence(tmp_path: Path) -> None:
    (tmp_path / "fs").mkdir()
    events = tmp_path / "fs" / "memory.events"
    events.write_text("oom_kill 4\n")
    counter = find_oom_counter(
        *cgroup_files(tmp_path, "0::/\n", f"30 1 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw\n")
    )
    assert oom_evidence(counter, 4) is None
    assert oom_evidence(counter, None) is None
    events.write_text("oom_kill 5\n")
    found = oom_evidence(counter, 4)
    assert found is not None
    assert "from 4 to 5" in found.describe()
    events.unlink()
    assert oom_evidence(counter, 4) is None
