"""Jobs on several nodes: one launcher per node, all of them on loopback."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bed.ports import free_port
from tests.bed.world import Outcome, World
from tests.launch.jobs import be_launcher, launch, write_script
from torsh_distributed.errors import ConfigurationError, OperationTimeout
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec

pytestmark = pytest.mark.ranks


def test_the_nodes_start_together_and_end_together(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT")
        leave(f"rank-{rank}", " ".join(os.environ[key] for key in keys))
        """,
    )
    first, second = launch(world, script, num_nodes=2)
    assert (first.value, second.value) == (0, 0), first.output + second.output
    found = [(tmp_path / f"rank-{rank}").read_text().split() for rank in range(4)]
    assert [line[:6] for line in found] == [
        ["0", "0", "4", "2", "0", "2"],
        ["1", "1", "4", "2", "0", "2"],
        ["2", "0", "4", "2", "1", "2"],
        ["3", "1", "4", "2", "1", "2"],
    ]
    assert len({line[6] for line in found}) == 1


def test_a_failure_on_one_node_restarts_all_of_them(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        leave(f"rank-{rank}-attempt-{attempt}", os.environ["MASTER_PORT"])
        if attempt == 0:
            if rank == 2:
                wait_for(*(f"rank-{number}-attempt-0" for number in range(4)))
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        """,
    )
    outcomes = launch(world, script, num_nodes=2, max_restarts=1)
    for outcome in outcomes:
        assert outcome.value == 0, outcome.output
        assert "rank 2 on node 1 (" in outcome.output
        assert "failed first: signal 9 (SIGKILL, killed)" in outcome.output
    ports = {
        attempt: {(tmp_path / f"rank-{rank}-attempt-{attempt}").read_text() for rank in range(4)} for attempt in (0, 1)
    }
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]


def test_a_failure_without_restarts_ends_all_nodes_with_its_code(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        leave(f"rank-{rank}")
        if rank == 3:
            wait_for(*(f"rank-{number}" for number in range(4)))
            sys.exit(9)
        signal.pause()
        """,
    )
    outcomes = launch(world, script, num_nodes=2)
    assert [outcome.value for outcome in outcomes] == [9, 9]


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_signal_to_one_launcher_ends_all_nodes(world: World, tmp_path: Path, node_rank: int) -> None:
    script = write_script(
        tmp_path,
        f"""
        leave(f"rank-{{rank}}")
        if rank == {2 * node_rank}:
            wait_for(*(f"rank-{{number}}" for number in range(4)))
            os.kill(launcher, signal.SIGTERM)
        signal.pause()
        """,
    )
    outcomes = launch(world, script, num_nodes=2)
    assert [outcome.value for outcome in outcomes] == [143, 143], [outcome.output for outcome in outcomes]


@pytest.mark.parametrize(("killed", "told"), [(1, 0), (0, 1)])
def test_a_launcher_that_is_killed_is_named_and_nothing_stays(
    world: World, tmp_path: Path, killed: int, told: int
) -> None:
    script = write_script(
        tmp_path,
        f"""
        leave(f"rank-{{rank}}")
        if rank == {2 * killed}:
            wait_for(*(f"rank-{{number}}" for number in range(4)))
            os.kill(launcher, signal.SIGKILL)
        signal.pause()
        """,
    )
    outcomes = launch(world, script, num_nodes=2)
    assert outcomes[killed].exit_code == -9
    assert outcomes[told].value == 1
    assert f"torsh run: node {killed} (" in outcomes[told].output
    # The kernel resets a connection on which something was still to be read.
    assert re.search(
        r"its launcher is gone: (it closed the connection|Connection reset by peer)", outcomes[told].output
    )


def test_a_launcher_that_is_stopped_is_missed_by_its_heartbeat(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        leave(f"rank-{rank}")
        wait_for(*(f"rank-{number}" for number in range(4)))
        if rank == 2:
            os.kill(launcher, signal.SIGSTOP)
            wait_for("ended")
            os.kill(launcher, signal.SIGCONT)
        elif rank == 0:
            # Ended by its launcher, which then tells by a file that it noticed.
            signal.signal(signal.SIGTERM, lambda *_: (leave("ended"), sys.exit(0)))
        stay()
        """,
    )
    first, second = launch(world, script, num_nodes=2, heartbeat_timeout_s=0.6)
    assert first.value == 1
    assert "node 1 (" in first.output
    assert "no sign of life for" in first.output
    assert second.value == 1


def test_absent_nodes_are_named_at_the_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    spec = JobSpec(
        entry=Entry(kind=EntryKind.COMMAND, target="true"),
        nnodes=3,
        master_port=free_port(),
        join_timeout_s=0.2,
        token="t",
    )
    assert launch_job(spec) == 1
    assert "node 1 and 2 of 3 did not join within 0.2 s" in capfd.readouterr().err


def test_a_master_that_is_not_there_is_named() -> None:
    spec = JobSpec(
        entry=Entry(kind=EntryKind.COMMAND, target="true"),
        nnodes=2,
        node_rank=1,
        master_port=free_port(),
        join_timeout_s=0.6,
        token="t",
    )
    with pytest.raises(OperationTimeout, match=r"could not join node 0 at 127\.0\.0\.1:\d+ within 0\.6 s") as caught:
        launch_job(spec)
    assert "Connection refused" in str(caught.value)


def test_a_master_that_has_no_address_is_named() -> None:
    spec = JobSpec(
        entry=Entry(kind=EntryKind.COMMAND, target="true"),
        nnodes=2,
        node_rank=1,
        master_addr="no-such-node.invalid",
        join_timeout_s=0.3,
        token="t",
    )
    with pytest.raises(OperationTimeout, match="could not join") as caught:
        launch_job(spec)
    assert "cannot be resolved" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nproc_per_node": 3}, "--nproc-per-node is 3 there and 2 on node 0"),
        pytest.param({"nnodes": 3}, "--nnodes is 3 there and 2 on node 0", marks=pytest.mark.matrix),
        pytest.param({"max_restarts": 1}, "--max-restarts is 1 there and 0 on node 0", marks=pytest.mark.matrix),
        ({"nnodes": 3, "node_rank": 2}, "--nnodes is 3 there"),
    ],
)
def test_a_node_that_disagrees_is_refused_and_both_sides_say_why(
    world: World, tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    script = write_script(tmp_path, "")
    first, second = join(world, script, [[{}], [changes, {}]])
    assert first.value == (0, [])
    assert reason in first.output
    code, (refusal,) = second.value
    assert code == 0
    assert reason in refusal


def test_a_second_launcher_for_the_same_node_is_refused(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    as_node_1 = [{"node_rank": 1}, {"node_rank": 2}]
    first, *others = join(world, script, [[{}], as_node_1, as_node_1])
    assert [outcome.value[0] for outcome in (first, *others)] == [0, 0, 0]
    (refusal,) = (text for outcome in others for text in outcome.value[1])
    assert "node rank 1 is already taken" in refusal
    assert "node rank 1 is already taken" in first.output


def join(world: World, script: str, tries: list[list[dict[str, Any]]]) -> list[Outcome]:
    """One launcher per node, each with its first settings, and with the next ones if node 0 does not let it in."""
    return world.outcomes(join_with_one_of, script, tries, num_ranks=len(tries), backend=None, timeout_s=100)


def join_with_one_of(script: str, tries: list[list[dict[str, Any]]]) -> tuple[int, list[str]]:
    """Runs on every rank: the exit code of the job that let this node in, and what was said by those that did not."""
    if os.environ["RANK"] != "0":
        wait_for_port(int(os.environ["MASTER_PORT"]))
    refusals: list[str] = []
    for changes in tries[int(os.environ["RANK"])]:
        try:
            return be_launcher(script, len(tries), changes, []), refusals
        except (ConfigurationError, OperationTimeout) as error:
            refusals.append(str(error))
    raise AssertionError(refusals)


def wait_for_port(port: int) -> None:
    """Until node 0 listens: what it says to a node then does not depend on which of them started sooner."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens on port {port}"
            time.sleep(0.02)


def test_another_token_is_turned_away(world: World, tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    first, second = join(world, script, [[{}], [{"token": "two", "join_timeout_s": 4.0}, {}]])
    assert first.value == (0, [])
    assert "were refused" in first.output
    code, (refusal,) = second.value
    assert code == 0
    assert "it does not have the job's secret" in refusal
    assert "--token-file" in refusal
    assert second.output.count("did not let this node in: it does not have the job's secret; trying again") == 1


def test_several_nodes_without_a_secret_are_refused_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    values = {"entry": Entry(kind=EntryKind.COMMAND, target="true"), "nnodes": 2, "join_timeout_s": 0.1}
    with pytest.raises(ConfigurationError, match="needs a secret") as caught:
        launch_job(JobSpec(**values, master_port=free_port()))
    assert "--token-file" in str(caught.value)
    assert launch_job(JobSpec(**values, master_port=free_port(), allows_no_token=True)) == 1
    assert "anyone who reaches the master port" in capfd.readouterr().err
