"""What happens to a job when something is killed, stopped or interrupted: the launcher, a worker, the guardian."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.world import World
from tests.launch.jobs import be_launcher, launch, write_script
from torsh_distributed.launch.local.exit_causes import find_oom_counter

pytestmark = pytest.mark.ranks

# Every rank has a child in its session and one that left it; all wait for ever once everybody is there.
WITH_CHILDREN = """
for number in range(2):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if number:
            os.setsid()
        leave(f"child-{rank}-{number}")
        while True:
            signal.pause()
leave(f"rank-{rank}")
wait_for(*(f"child-{r}-{n}" for r in range(2) for n in range(2)), "rank-0", "rank-1")
"""


def test_nothing_outlives_a_launcher_that_is_killed(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, WITH_CHILDREN, "os.kill(launcher, signal.SIGKILL)\nsignal.pause()\n")
    (outcome,) = launch(world, script)
    assert outcome.exit_code == -9


def test_nothing_outlives_a_launcher_whose_guardian_was_killed_first(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        WITH_CHILDREN,
        """
        def guardians():
            children = open(f"/proc/{launcher}/task/{launcher}/children").read().split()
            return [int(pid) for pid in children if b"guardian.py" in open(f"/proc/{pid}/cmdline", "rb").read()]
        if rank == 0:
            (first,) = guardians()
            os.kill(first, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while guardians() in ([], [first]):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            os.kill(launcher, signal.SIGKILL)
        signal.pause()
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.exit_code == -9


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129), ("SIGQUIT", 131)])
def test_a_signal_reaches_the_workers_who_may_save_and_nothing_stays(
    world: World, tmp_path: Path, name: str, code: int
) -> None:
    script = write_script(
        tmp_path,
        WITH_CHILDREN,
        f"""
        def save(*_):
            leave(f"saved-{{rank}}")
            sys.exit(0)
        signal.signal(signal.{name}, save)
        leave(f"ready-{{rank}}")
        wait_for("ready-0", "ready-1")
        if rank == 0:
            os.kill(launcher, signal.{name})
        stay()
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == code, outcome.output
    assert f"{name} is forwarded to rank 0 and 1" in outcome.output
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


def test_the_second_interrupt_kills_at_once(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        WITH_CHILDREN,
        """
        signal.signal(signal.SIGINT, lambda *_: leave(f"asked-{rank}"))
        leave(f"ready-{rank}")
        wait_for("ready-0", "ready-1")
        if rank == 0:
            os.kill(launcher, signal.SIGINT)
            wait_for("asked-0", "asked-1")
            os.kill(launcher, signal.SIGINT)
        stay()
        """,
    )
    # Without the second signal the workers would have 300 s, far beyond the limit of the test.
    (outcome,) = launch(world, script, signal_timeout_s=300.0)
    assert outcome.value == 130
    assert "SIGINT again: everything is killed now" in outcome.output


def test_workers_deaf_to_a_signal_are_killed_in_the_end(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave(f"rank-{rank}")
        wait_for("rank-0", "rank-1")
        if rank == 0:
            os.kill(launcher, signal.SIGTERM)
        signal.pause()
        """,
    )
    (outcome,) = launch(world, script, signal_timeout_s=0.3)
    assert outcome.value == 143


def test_user_signals_are_passed_on_and_the_job_goes_on(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        signal.signal(signal.SIGUSR1, lambda *_: leave(f"heard-{rank}"))
        leave(f"rank-{rank}")
        wait_for("rank-0", "rank-1")
        if rank == 1:
            os.kill(launcher, signal.SIGUSR1)
        wait_for("heard-0", "heard-1")
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 0, outcome.output


def test_a_stopped_worker_does_not_hold_up_the_end(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        if rank == 0:
            leave("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for("pid")
        pid = int(open(os.path.join(folder, "pid")).read())
        while open(f"/proc/{pid}/stat").read().split()[2] != "T":
            time.sleep(0.005)
        sys.exit(6)
        """,
    )
    (outcome,) = launch(world, script, shutdown_timeout_s=0.3)
    assert outcome.value == 6


def test_the_world_comes_back_after_every_one_of_many_kills(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        leave(f"rank-{rank}-attempt-{attempt}")
        if attempt < 6:
            if rank == attempt % 3:
                wait_for(*(f"rank-{number}-attempt-{attempt}" for number in range(3)))
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        """,
    )
    (outcome,) = launch(world, script, nproc_per_node=3, max_restarts=6)
    assert outcome.value == 0, outcome.output
    victims = re.findall(r"rank (\d) failed first: signal 9", outcome.output)
    assert victims == ["0", "1", "2", "0", "1", "2"]


PLAIN_TORCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(6):
    if step == 3 and rank == 1 and attempt == 0:
        print(f"killed {time.time()}")
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.full((4,), float(step))
    dist.all_reduce(total)
    assert total.tolist() == [2.0 * step] * 4
    if step == 0:
        print(f"resumed {time.time()}")
dist.destroy_process_group()
leave(f"finished-{rank}")
"""


def test_a_plain_torch_script_killed_in_mid_training_comes_back_and_finishes(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, PLAIN_TORCH)
    (outcome,) = launch(world, script, max_restarts=1, forks_workers=True)
    assert outcome.value == 0, outcome.output
    assert (tmp_path / "finished-0").exists()
    assert (tmp_path / "finished-1").exists()
    assert "rank 1 failed first: signal 9 (SIGKILL, killed)" in outcome.output
    assert len(re.findall(r"resumed", outcome.output)) == 4


LIMIT_BYTES = 256 << 20


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with little memory, of version 1 or 2; skips where this user may not make one."""
    counter = find_oom_counter()
    if counter is not None and counter.path.name == "memory.oom_control":
        group, limit = counter.path.parent / f"torsh-test-{os.getpid()}", "memory.limit_in_bytes"
    else:
        group, limit = Path(f"/sys/fs/cgroup/torsh-test-{os.getpid()}"), "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group with a memory limit can be made: {error}")
    try:
        yield group
    finally:
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        group.rmdir()


def launch_inside(script: str, group: str) -> int:
    """Runs on the rank: enter the memory group, then launch; the workers are born into it."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    return be_launcher(script, 1, {}, [])


def test_an_out_of_memory_kill_is_proven_by_the_kernels_count(world: World, tmp_path: Path, memory_group: Path) -> None:
    script = write_script(
        tmp_path,
        """
        if rank == 1:
            # The launcher has torch mapped and would look like the larger process.
            open("/proc/self/oom_score_adj", "w").write("1000")
            hoard = []
            while True:
                hoard.append(bytearray(4 << 20))
        signal.pause()
        """,
    )
    (outcome,) = world.outcomes(launch_inside, script, str(memory_group), num_ranks=1, backend=None, timeout_s=40)
    assert outcome.value == 137, outcome.output
    assert "rank 1 failed first: signal 9 (SIGKILL, killed)" in outcome.output
    assert "out of memory: the kernel's count of out-of-memory kills rose from 0 to 1" in outcome.output


def test_a_kill_by_hand_is_not_called_out_of_memory(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    (outcome,) = launch(world, script)
    assert outcome.value == 137
    assert "memory" not in outcome.output
