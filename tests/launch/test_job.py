from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.bed.world import World
from tests.launch.jobs import launch, write_script
from torsh_distributed.errors import CommunicationError, InvalidArgument, IoError
from torsh_distributed.launch.job import describe_job, launch_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec

pytestmark = pytest.mark.ranks


def test_every_worker_runs_with_its_rank_in_front_of_its_lines(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        print("I am", rank, "of", os.environ["WORLD_SIZE"])
        print("oops", file=sys.stderr)
        """,
    )
    (outcome,) = launch(world, script, nproc_per_node=3)
    assert outcome.value == 0, outcome
    for rank in range(3):
        assert f"[rank {rank}] I am {rank} of 3\n" in outcome.output
        assert f"[rank {rank}] oops\n" in outcome.output


def test_arguments_reach_the_script_as_they_are(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "print(sys.argv[1:])")
    entry = Entry(target=script, args=("--lr", "0.1", "a b", "--nproc-per-node=9"))
    (outcome,) = launch(world, script, nproc_per_node=1, entry=entry)
    assert "['--lr', '0.1', 'a b', '--nproc-per-node=9']" in outcome.output


def test_the_first_failure_is_named_with_what_is_known_about_it(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        from torsh_distributed.launch.worker.recording.progress import ProgressWriter
        if rank == 1:
            ProgressWriter(os.environ["TORSH_PROGRESS_FILE"]).record(step=120, checkpoint_step=100)
            wait_for("ready")
            print("the reason is here", file=sys.stderr)
            sys.exit(7)
        leave("ready")
        signal.pause()
        """,
    )
    (outcome,) = launch(world, script, log_dir=tmp_path / "logs")
    assert outcome.value == 7
    report = outcome.output.partition("torsh run: rank 1 failed first: exit code 7")[2]
    assert "last step: 120; last checkpoint: step 100" in report
    assert "    the reason is here\n" in report
    assert "attempt-0/rank-1.stderr.log" in report
    assert "the job ended with exit code 7 after 1 attempt" in report


def test_a_segmentation_fault_is_said_in_words(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "import ctypes\nif rank == 0:\n    ctypes.string_at(0)\nsignal.pause()\n")
    (outcome,) = launch(world, script)
    assert outcome.value == 139
    assert "rank 0 failed first: signal 11 (SIGSEGV, segmentation fault" in outcome.output


def test_a_worker_that_ignores_sigterm_is_killed_after_a_failure(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            leave("ready")
            signal.pause()
        wait_for("ready")
        sys.exit(2)
        """,
    )
    (outcome,) = launch(world, script, shutdown_timeout_s=0.3)
    assert outcome.value == 2


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (3, 143)])
def test_after_a_signal_the_exit_code_says_whether_the_workers_saved(
    world: World, tmp_path: Path, code: int, expected: int
) -> None:
    script = write_script(
        tmp_path,
        f"""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
        leave(f"ready-{{rank}}")
        if rank == 0:
            wait_for("ready-1")
            os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == expected


def test_an_early_clean_exit_is_named_when_the_rest_fails(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        if rank == 1:
            leave("gone", str(os.getpid()))
            sys.exit(0)
        wait_for("gone")
        pid = int(open(os.path.join(folder, "gone")).read())
        while open(f"/proc/{pid}/stat").read().split()[2] != "Z":
            time.sleep(0.005)
        sys.exit(3)
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 3
    assert "rank 1 had ended normally" in outcome.output


def test_children_that_workers_leave_behind_end_with_the_job(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        for number in range(2):
            if os.fork() == 0:
                if number:
                    os.setsid()
                leave(f"child-{rank}-{number}")
                signal.pause()
        wait_for(f"child-{rank}-0", f"child-{rank}-1")
        """,
    )
    (outcome,) = launch(world, script)
    assert outcome.value == 0


def test_a_restart_has_a_store_of_its_own_and_logs_of_its_own(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], "port", os.environ["MASTER_PORT"])
        leave(f"printed-{rank}-{attempt}")
        if attempt < 2 and rank == attempt:
            wait_for(f"printed-0-{attempt}", f"printed-1-{attempt}")
            sys.exit(5)
        if attempt < 2:
            signal.pause()
        """,
    )
    (outcome,) = launch(world, script, max_restarts=2, log_dir=tmp_path / "logs", run_id="mine")
    assert outcome.value == 0, outcome.output
    assert "restart 1 of 2" in outcome.output
    assert "restart 2 of 2" in outcome.output
    (run,) = (tmp_path / "logs").iterdir()
    assert run.name.startswith("mine-")
    ports = []
    for attempt in range(3):
        lines = [(run / f"attempt-{attempt}" / f"rank-{rank}.stdout.log").read_text() for rank in range(2)]
        assert lines[0] == lines[1]
        assert lines[0].startswith(f"attempt {attempt} of 2 port ")
        ports.append(lines[0].split()[-1])
    assert len(set(ports)) == 3


def test_restarts_are_counted_and_the_last_failure_ends_the_job(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "sys.exit(10 + attempt)")
    (outcome,) = launch(world, script, max_restarts=2, nproc_per_node=1)
    assert outcome.value == 12
    assert "after 3 attempts" in outcome.output


def test_a_chosen_port_is_kept_over_restarts_and_open_on_loopback_only(world: World, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = write_script(
        tmp_path,
        """
        port = int(os.environ["MASTER_PORT"])
        listening = [line.split()[1] for line in open("/proc/net/tcp").readlines()[1:] if line.split()[3] == "0A"]
        print("port", port, "on", [address for address in listening if int(address.split(":")[1], 16) == port])
        sys.exit(attempt == 0)
        """,
    )
    (outcome,) = launch(world, script, max_restarts=1, nproc_per_node=1, master_port=port)
    assert outcome.value == 0, outcome.output
    assert outcome.output.count(f"port {port} on ['0100007F:{port:04X}']") == 2


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CommunicationError, match=f"port {port} on 127.0.0.1 is in use"):
            launch_job(JobSpec(entry=Entry(kind=EntryKind.COMMAND, target="true"), master_port=port))


def test_a_foreign_master_address_is_named() -> None:
    with pytest.raises(CommunicationError, match=r"192\.0\.2\.1 is not an address of this node"):
        launch_job(JobSpec(entry=Entry(kind=EntryKind.COMMAND, target="true"), master_addr="192.0.2.1"))


def test_a_job_that_cannot_start_raises_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        launch_job(JobSpec(entry=Entry(target=str(tmp_path / "absent.py"))))
    with pytest.raises(IoError, match="log directory cannot be written"):
        launch_job(JobSpec(entry=Entry(kind=EntryKind.COMMAND, target="true"), log_dir=Path("/proc/no")))


def test_a_command_that_is_no_program_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("neither a script nor a binary")
    program.chmod(0o755)
    with pytest.raises(IoError, match="worker of rank 0 cannot be started"):
        launch_job(JobSpec(entry=Entry(kind=EntryKind.COMMAND, target=str(program))))


def test_modules_and_commands_run(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    module = Entry(kind=EntryKind.MODULE, target="json.tool", args=("--help",))
    (outcome,) = launch(world, script, nproc_per_node=1, entry=module)
    assert outcome.value == 0
    assert "[rank 0] usage:" in outcome.output
    command = Entry(kind=EntryKind.COMMAND, target="sh", args=("-c", "echo rank is $RANK"))
    (outcome,) = launch(world, script, nproc_per_node=1, entry=command)
    assert "[rank 0] rank is 0" in outcome.output


def test_only_the_chosen_local_ranks_are_shown(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('hello')")
    (outcome,) = launch(world, script, shown_ranks=frozenset({1}), log_dir=tmp_path / "logs")
    assert "[rank 1] hello" in outcome.output
    assert "[rank 0]" not in outcome.output
    (log,) = (tmp_path / "logs").glob("*/attempt-0/rank-0.stdout.log")
    assert log.read_text() == "hello\n"


def test_the_launcher_writes_its_events(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "if attempt == 0 and rank == 1:\n    sys.exit(4)")
    (outcome,) = launch(world, script, max_restarts=1, env={"TORSH_EVENTS_DIR": str(tmp_path / "events")})
    assert outcome.value == 0
    (file,) = (tmp_path / "events").glob("launcher-*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(event["type"], event["action"], event["attempt"]) for event in events] == [
        ("membership", "started", 0),
        ("membership", "lost", 0),
        ("membership", "restarted", 1),
        ("membership", "ended", 1),
    ]
    assert events[1]["detail"] == "rank 1: exit code 4"


def test_a_dry_run_says_what_would_start() -> None:
    spec = JobSpec(entry=Entry(target="t.py", args=("a b",)), nproc_per_node=2, nnodes=2, node_rank=1, max_restarts=3)
    text = "\n".join(describe_job(spec))
    assert "node 1 of 2: 2 of 4 workers, up to 3 restarts" in text
    assert "t.py 'a b'" in text
    assert "RANK=3" in text
    assert "TOKEN" not in text


def test_escapes_of_ranks_are_shown_not_obeyed(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        print("\\x1b]0;owned\\x07", flush=True)
        if rank == 1:
            raise ValueError("\\x1b]52;c;cm0=\\x07")
        signal.pause()
        """,
    )
    (outcome,) = launch(world, script)
    assert "\\x1b]0;owned\\x07" in outcome.output
    assert "ValueError: \\x1b]52;c;cm0=\\x07" in outcome.output
    assert "\x1b]" not in outcome.output
    (raw,) = launch(world, script, is_raw=True)
    assert "\x1b]0;owned\x07" in raw.output
