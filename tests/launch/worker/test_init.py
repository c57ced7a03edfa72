"""init(): one call under every launcher; broken starts are refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torsh_distributed as td
from tests.bed.ports import free_port
from tests.bed.world import World
from torsh_distributed.comm.collectives.call import are_checks_enabled
from torsh_distributed.errors import ConfigurationError, InvalidArgument, OperationTimeout
from torsh_distributed.observe import start_reporting, stop_reporting

pytestmark = pytest.mark.ranks

MEET = """
import os, torch, torch.distributed as dist, torsh_distributed as td
found = td.init(timeout_s=60)
value = torch.tensor([float(td.rank() + 1)])
dist.all_reduce(value)
place = f"rank {td.rank()} of {td.world_size()}, local {td.local_rank()}"
os.write(1, f"{found.source}: {place}, sum {value.item()}\\n".encode())
td.destroy_process_group()
"""


def join_by_environment(variables: dict[str, str]) -> tuple[str, float]:
    rank, size, port = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update({name: text.format(rank=rank, size=size, port=port) for name, text in variables.items()})
    found = td.init(timeout_s=20)
    value = torch.tensor(float(td.rank() + 1))
    dist.all_reduce(value)
    td.destroy_process_group()
    return found.source, value.item()


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("RANK and WORLD_SIZE", {"RANK": "{rank}", "WORLD_SIZE": "{size}"}),
        (
            "Open MPI",
            {
                "OMPI_COMM_WORLD_RANK": "{rank}",
                "OMPI_COMM_WORLD_SIZE": "{size}",
                "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
            },
        ),
        ("MPICH", {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}"}),
        (
            "SLURM",
            {
                "SLURM_PROCID": "{rank}",
                "SLURM_NTASKS": "{size}",
                "SLURM_STEP_ID": "0",
                "SLURM_JOB_NODELIST": "localhost",
            },
        ),
    ],
)
def test_the_variables_of_each_launcher_bring_up_the_world(
    world: World, source: str, variables: dict[str, str]
) -> None:
    results = world.run(join_by_environment, {**variables, "MASTER_PORT": "{port}"}, backend=None)
    assert results == [(source, 3.0), (source, 3.0)]


def told_of_steps() -> list[int | None]:
    """The number of steps that the job is said to have, by plan, before any Engine."""
    found = []
    for plan in (None, td.Plan(training={"batch_size": 8}), td.Plan(training={"steps": 70})):
        reporter = start_reporting(lambda packet: True)
        with td.distributed(plan):
            found.append(reporter.facts.get("total_steps"))
        stop_reporting()
    return found


def test_a_loop_of_ones_own_has_an_end_if_the_plan_sets_one(world: World) -> None:
    """What is told is what the page computes the time that is left from; the default would be made up."""
    assert world.run(told_of_steps, backend=None, num_ranks=1) == [[None, None, 70]]


@pytest.mark.matrix
def test_a_plain_torchrun_is_accepted(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            script,
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"torchrun: rank {rank} of 2, local {rank}, sum 3.0" for rank in (0, 1)]


def alone() -> tuple[int, int, str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    found = td.init()
    return td.rank(), td.world_size(), found.source


def test_without_a_launcher_the_world_has_one_rank(world: World) -> None:
    assert world.run(alone, num_ranks=1, backend=None) == [(0, 1, "nothing: a world of one")]


def explicit() -> float:
    place = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    td.init_process_group(
        "gloo", int(place["RANK"]), int(place["WORLD_SIZE"]), "127.0.0.1", int(place["MASTER_PORT"]), 20
    )
    value = torch.ones(())
    dist.all_reduce(value)
    return value.item()


def test_every_value_can_be_given_by_hand(world: World) -> None:
    assert world.run(explicit, num_ranks=3, backend=None) == [3.0] * 3


def absent_peer() -> None:
    os.environ["WORLD_SIZE"] = "3"
    os.environ["TORSH_INIT_TIMEOUT"] = "1"
    td.init()


def test_an_absent_peer_is_named_within_the_deadline(world: World) -> None:
    for outcome in world.outcomes(absent_peer, backend=None):
        assert isinstance(outcome.error, OperationTimeout)
        assert outcome.error.context["missing_ranks"] == [2]


def scoped() -> tuple[bool, bool]:
    with td.distributed(backend="gloo"):
        inside = td.is_initialized()
    return inside, td.is_initialized()


def test_a_with_block_takes_the_group_down_again(world: World) -> None:
    assert world.run(scoped, backend=None) == [(True, False)] * 2


def record(directory: str, initialize: Callable[[], object]) -> bool:
    os.environ.update(TORSH_EVENTS_DIR=directory, TORSH_DEBUG="1")
    initialize()
    td.events.emit(td.events.LogEvent(level="info", message="here"))
    td.destroy_process_group()
    # The world's ranks leave through os._exit, which runs no exit hooks: close as an interpreter would.
    from torsh_distributed.launch.worker.recording import event_recording

    for recorder in event_recording._recorders[os.getpid()]:
        recorder.close()
    return are_checks_enabled()


@pytest.mark.parametrize("initialize", [td.init, td.init_process_group])
def test_the_variables_for_events_and_checks_are_followed(
    world: World, tmp_path: Path, initialize: Callable[[], object]
) -> None:
    assert world.run(record, str(tmp_path), initialize, backend=None) == [True, True]
    for rank in (0, 1):
        lines = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line.get("subject") != "shm core"]  # told where it is not compiled
        assert [line["type"] for line in lines] == ["decision", "membership", "log", "membership"]
        assert {line["rank"] for line in lines} == {rank}


def wrong_backend(name: str) -> str:
    try:
        td.init_process_group(name)
    except (InvalidArgument, td.TorshError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("name", "message"),
    [("glo", "did you mean 'gloo'?"), ("ucc", "cannot be used here"), ("quantum", "unknown backend")],
)
def test_a_backend_that_cannot_work_is_refused_before_ranks_meet(world: World, name: str, message: str) -> None:
    [answer] = world.run(wrong_backend, name, num_ranks=1, backend=None)
    assert message in answer


def bad_timeout() -> None:
    os.environ["TORSH_INIT_TIMEOUT"] = "soon"
    td.init()


def test_a_timeout_that_is_no_number_is_refused(world: World) -> None:
    with pytest.raises(ConfigurationError, match="TORSH_INIT_TIMEOUT must be a number of seconds"):
        world.run(bad_timeout, num_ranks=1, backend=None)
