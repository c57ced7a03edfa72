"""Which rank the launcher names, and why: jobs that go wrong on purpose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.fault_matrix import FAULTS, run_fault
from tests.bed.world import World
from tests.launch.jobs import launch, write_script

pytestmark = pytest.mark.ranks

# A rank that fails because of another: the real error, without the backend that would raise it.
RAISE_ABOUT_PEER = """
from torsh_distributed.errors import CommunicationError
def blame(peer):
    raise CommunicationError("rank 1 left the group", peer=peer, operation="all_reduce", sequence=118)
"""


def test_the_cause_is_named_although_its_consequence_came_first(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        RAISE_ABOUT_PEER,
        """
        if rank != 1:
            leave(f"about-to-fail-{rank}")
            blame(1)
        wait_for("about-to-fail-0", "about-to-fail-2")
        time.sleep(0.3)
        def step():
            raise ValueError("the batch is broken")
        step()
        """,
    )
    (outcome,) = launch(world, script, nproc_per_node=3)
    assert outcome.value == 1
    first, second, _, others = outcome.output.splitlines()[:4]
    assert re.fullmatch(r"torsh run: .*worker\.py:\d+ in step: ValueError: the batch is broken", first)
    assert second.startswith("  rank 1, pid ")
    assert others == "  ranks 0 and 2 waited in all_reduce #118"
    assert outcome.output.count("Traceback") == 0, "the traceback is in the report, folded"
    assert outcome.output.count("ValueError: the batch is broken") == 2, "the first line, and the end of the traceback"
    assert "CommunicationError" not in outcome.output, "consequences are one line"


def test_a_consequence_without_a_cause_is_reported_after_a_moment(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, RAISE_ABOUT_PEER, "if rank == 0:\n    blame(5)\nsignal.pause()\n")
    (outcome,) = launch(world, script)
    assert outcome.value == 1
    assert "CommunicationError: rank 1 left the group" in outcome.output


def test_a_handled_exception_behind_sys_exit_is_shown_and_an_unhandled_in_a_thread_is_not_fatal(
    world: World, tmp_path: Path
) -> None:
    script = write_script(
        tmp_path,
        """
        import threading
        if rank == 0:
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
            leave("ready")
            signal.pause()
        wait_for("ready")
        try:
            {}["lr"]
        except KeyError:
            sys.exit(3)
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 3
    assert re.search(r"torsh run: .*worker\.py:\d+: KeyError: 'lr'\n  rank 1, pid \d+, exit code 3\n", outcome.output)
    assert "[rank 0] ZeroDivisionError" in outcome.output


def test_a_segmentation_fault_is_shown_with_the_users_line(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import ctypes\ndef step():\n    ctypes.string_at(0)\nif rank == 1:\n    step()\nsignal.pause()\n"
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 139
    assert re.search(r"rank 1 failed first: signal 11 \(SIGSEGV, .*\) at .*worker\.py:\d+ in step\n", outcome.output)


def test_an_exception_is_the_cause_though_the_process_then_aborts(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import atexit
        if rank == 1:
            atexit.register(os.abort)
            raise ValueError("bad batch")
        signal.pause()
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 134
    assert re.search(
        r"torsh run: .*worker\.py:\d+: ValueError: bad batch\n  rank 1, pid \d+, exit code 134\n", outcome.output
    )


def test_control_c_is_a_line_or_two_but_an_error_on_the_way_out_is_told(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        try:
            leave(f"ready-{rank}")
            wait_for("ready-0", "ready-1")
            if rank == 0:
                os.kill(launcher, signal.SIGINT)
            stay()
        finally:
            if rank == 1:
                raise OSError("the disk is full")
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 130
    said = outcome.output.splitlines()
    assert [line for line in said if "OSError: the disk is full" in line and "rank 1" in line]
    assert len(said) == 2, outcome.output


def test_with_verbose_every_traceback_is_shown_and_the_log_has_them_always(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        def refuse(*_):
            raise ValueError(f"no {rank}")
        if rank == 1:
            signal.signal(signal.SIGTERM, refuse)
            leave("ready-1")
            while True:  # not signal.pause(): another thread may get the signal
                time.sleep(0.05)
        wait_for("ready-1")
        refuse()
        """,
    )
    for is_verbose in (False, True):
        (tmp_path / "ready-1").unlink(missing_ok=True)  # of the job before: rank 0 would not wait for rank 1
        logs = tmp_path / f"logs-{is_verbose}"
        (outcome,) = launch(world, script, is_verbose=is_verbose, log_dir=logs, shutdown_timeout_s=30.0)
        assert outcome.value == 1
        assert ("[rank 0] Traceback (most recent call last):" in outcome.output) is is_verbose
        for rank in range(2):
            (log,) = logs.glob(f"*/attempt-0/rank-{rank}.stderr.log")
            text = log.read_text()
            assert text.startswith("Traceback (most recent call last):\n")
            assert f"ValueError: no {rank}" in text
            assert "worker_start" not in text


def test_json_is_one_object_with_the_cause(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "if rank == 1:\n    raise ValueError('no')\nsignal.pause()\n")
    (outcome,) = launch(world, script, is_json=True)
    report = json.loads(outcome.output)
    assert report["exit_code"] == outcome.value == 1
    (failure,) = report["failures"]
    assert (failure["rank"], failure["raised"]["kind"]) == (1, "ValueError")


def test_a_script_finds_everything_as_under_plain_python(world: World, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 1\n")
    script = write_script(
        tmp_path,
        """
        import __main__, beside, inspect, multiprocessing, pickle, threading
        def function():
            return 1
        assert __name__ == "__main__" and __main__.function is function and __spec__ is None
        assert __file__ == sys.argv[0] and sys.path[0] == folder and "worker_start" not in sys.path[0]
        assert inspect.getsource(function).startswith("def function")
        assert pickle.loads(pickle.dumps(function)) is function
        assert not [name for name in os.environ if "LINE_FD" in name]
        assert not [name for name in sys.modules if name == "torsh_distributed" or name.startswith("torch")]
        if __name__ == "__main__" and rank == 0:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                assert pool.apply(function) == 1
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 0, outcome.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("exception, finally destroy", "shm"),
        pytest.param("deadlock of two groups", "gloo", marks=pytest.mark.matrix),  # waits for the deadline
    ],
)
def test_a_fault_in_training_is_named(tmp_path: Path, name: str, backend: str) -> None:
    """One of each kind; `python -m benchmarks faults` runs them all."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    (outcome,) = run_fault(fault, backend, 2, tmp_path)
    assert outcome.is_right_rank, outcome.output
    assert outcome.is_right_cause, outcome.output


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_named_on_shared_memory(tmp_path: Path, fault: object) -> None:
    (outcome,) = run_fault(fault, "shm", 4, tmp_path)  # type: ignore[arg-type]  # parametrize gives objects
    assert (outcome.is_right_rank, outcome.is_right_cause) == (True, True), outcome.output
