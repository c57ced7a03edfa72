"""Workers are killed while they train, at every point of a step; the others go on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.chaos.faults import process_state, stop, wait_for_mark
from tests.elastic.jobs import ElasticOutcome, run_job, undisturbed, wait_for_joined
from tests.elastic.training_script import NUM_STEPS
from torsh_distributed.launch.control.job_commands import ask_launcher, find_job

pytestmark = pytest.mark.ranks

NUM_LONG_STEPS = 400
"""Enough for a worker to be started and to join meanwhile."""


def check_as_undisturbed(outcome: ElasticOutcome, *, num_steps: int = NUM_STEPS) -> None:
    """Every step once, with the losses and the weights of one process that trained alone."""
    assert outcome.code == 0, outcome.output
    losses, weights = undisturbed(num_steps)
    found = outcome.losses()
    assert sorted(found) == list(range(1, num_steps + 1)), outcome.output
    torch.testing.assert_close(
        torch.tensor([found[step] for step in sorted(found)]), torch.tensor(losses), rtol=1e-4, atol=1e-6
    )
    ended = outcome.weights()
    assert ended, outcome.output
    for held in ended.values():
        torch.testing.assert_close(held, weights, rtol=1e-3, atol=1e-5)
        for name, value in held.items():
            assert torch.equal(value, next(iter(ended.values()))[name]), "replicas differ"


def test_survivors_go_on_after_kills_in_every_phase_rank_0_included(tmp_path: Path) -> None:
    faults = (
        "kill rank 1 at step 6 in gradient",
        "kill rank 0 at step 11 in layer",
        "kill rank 3 at step 16 in updated",
    )
    outcome = run_job(tmp_path, "--on-loss", "shrink", num_workers=5, faults=faults)
    check_as_undisturbed(outcome)
    for survivor in (2, 4):
        records = outcome.steps(survivor)
        assert len({record["pid"] for record in records}) == 1
        assert [record["world"] for record in records][-1] == 2
    assert outcome.output.count("is lost: signal 9") == 3
    assert outcome.output.count("regrouped:") == 3


@pytest.mark.matrix
def test_a_stopped_worker_is_replaced_and_cannot_come_back(tmp_path: Path) -> None:
    def meanwhile(folder: Path) -> None:
        pid = wait_for_mark(folder, rank=1, step=5, within_s=60)
        stop(pid)
        wait_for_joined(folder, member=3)
        assert process_state(pid) in (None, "Z"), "the stopped worker was not fenced"

    outcome = run_job(tmp_path, num_workers=3, num_steps=NUM_LONG_STEPS, is_slow=True, meanwhile=meanwhile)
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "worker 1" in outcome.output
    assert "stopped (SIGSTOP)" in outcome.output
    assert "worker 3 joined: 3 workers" in outcome.output
    assert len(outcome.weights()) == 3


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
@pytest.mark.parametrize("point", ["", "forward", "layer", "gradient", "update", "updated"])
@pytest.mark.parametrize("victim", [0, 2])
def test_every_backend_every_phase(tmp_path: Path, backend: str, point: str, victim: int) -> None:
    fault = f"kill rank {victim} at step 7" + (f" in {point}" if point else "")
    outcome = run_job(tmp_path, "--on-loss", "shrink", faults=(fault,), backend=backend, checkpoints=True)
    check_as_undisturbed(outcome)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "faults",
    [
        ("kill rank 1 at step 6 in gradient", "kill rank 3 at step 6 in gradient"),
        ("kill rank 0 at step 6 in updated", "kill rank 2 at step 7 in layer"),
        ("kill rank 0 at step 6", "kill rank 1 at step 6", "kill rank 2 at step 6 in gradient"),
    ],
)
def test_several_failures_within_one_recovery(tmp_path: Path, faults: tuple[str, ...]) -> None:
    outcome = run_job(tmp_path, "--on-loss", "shrink", faults=faults, num_workers=4)
    check_as_undisturbed(outcome)


@pytest.mark.matrix
def test_everyone_dead_restarts_from_the_checkpoint_or_ends_with_the_cause(tmp_path: Path) -> None:
    faults = tuple(f"kill rank {rank} at step 8" for rank in range(3))
    (tmp_path / "again").mkdir()
    outcome = run_job(tmp_path / "again", "--max-restarts", "1", faults=faults, checkpoints=True)
    assert outcome.code == 0, outcome.output
    assert "not in place: no worker is left" in outcome.output
    (tmp_path / "ended").mkdir()
    outcome = run_job(tmp_path / "ended", "--max-restarts", "0", faults=faults)
    assert outcome.code == 137, outcome.output


@pytest.mark.matrix
def test_fewer_than_the_least_number_waits_for_a_replacement(tmp_path: Path) -> None:
    faults = ("kill rank 1 at step 8 in layer",)
    outcome = run_job(tmp_path, "--min-workers", "3", faults=faults, num_steps=NUM_LONG_STEPS)
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "2 wait for a replacement" in outcome.output
    assert {record["world"] for record in outcome.steps(0)} == {3}


@pytest.mark.matrix
def test_a_joiner_that_dies_while_it_starts_is_replaced_in_turn(tmp_path: Path) -> None:
    faults = ("kill rank 1 at step 20", "kill rank 3 at step 0 in start")
    outcome = run_job(
        tmp_path,
        faults=faults,
        num_steps=NUM_LONG_STEPS,
        is_slow=True,
        meanwhile=lambda folder: wait_for_joined(folder, member=4),
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "worker 3" in outcome.output
    assert "it had not joined" in outcome.output
    assert "worker 4 joined" in outcome.output


@pytest.mark.matrix
def test_a_raised_exception_is_a_loss_too_and_says_so(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, "--on-loss", "shrink", faults=("raise rank 1 at step 8 in layer",))
    check_as_undisturbed(outcome)
    assert "InjectedFault" in outcome.output


@pytest.mark.matrix
def test_scaling_up_and_down_lets_workers_in_and_out_between_two_steps(tmp_path: Path) -> None:
    def meanwhile(folder: Path) -> None:
        wait_for_mark(folder, rank=0, step=5, within_s=60)
        os.kill(find_job("scaled").pid, signal.SIGTTIN)
        wait_for_joined(folder, member=2)
        assert ask_launcher(find_job("scaled").pid, "scale", workers=1)["is_done"]
        assert not ask_launcher(find_job("scaled").pid, "scale", workers=99)["is_done"]
        wait_for_mark(folder, rank=0, step=NUM_LONG_STEPS, within_s=60)

    outcome = run_job(
        tmp_path, "--rdzv-id", "scaled", num_workers=2, num_steps=NUM_LONG_STEPS, is_slow=True, meanwhile=meanwhile
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert list(outcome.weights()) == [0]
    assert "lost" not in outcome.output
