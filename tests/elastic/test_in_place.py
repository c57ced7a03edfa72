"""Workers are killed while they train, at every point of a step; the others go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.chaos.faults import kill, process_state, stop, wait_for_mark
from tests.elastic.jobs import (
    ROOT,
    ElasticOutcome,
    run_job,
    start_job,
    undisturbed,
    wait_for_fault,
    wait_for_joined,
    wait_for_spare,
)
from tests.elastic.training_script import BATCH, NUM_STEPS
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory
from torsh_distributed.checkpoint.files.manifest import read_manifest
from torsh_distributed.checkpoint.files.verification import find_damage
from torsh_distributed.errors import JobNotFound
from torsh_distributed.launch.control.job_commands import ask_launcher, find_job

pytestmark = pytest.mark.ranks

NUM_LONG_STEPS = 400
"""Enough for a worker to be started and to join meanwhile."""


def check_as_undisturbed(outcome: ElasticOutcome, *, num_steps: int = NUM_STEPS, width: int = 64) -> None:
    """Every step once, with the losses and the weights of one process that trained alone."""
    assert outcome.code == 0, outcome.output
    losses, weights = undisturbed(num_steps, width=width)
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


def check_checkpoints(folder: Path) -> None:
    """The last step is kept, and nothing that is kept is damaged."""
    kept = CheckpointDirectory(folder)
    assert NUM_STEPS in kept.complete_steps()
    for step in kept.complete_steps():
        assert not find_damage(kept.step_path(step), read_manifest(kept.step_path(step)))


@pytest.mark.needs_core  # without it gradients are not kept, and the step is done again
def test_survivors_go_on_after_kills_in_every_pass_of_a_step_rank_0_included(tmp_path: Path) -> None:
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
    # Those that were in backward when one was lost keep what they had: what is done in addition is the lost one's part.
    assert outcome.output.count("gradients kept") >= 2, outcome.output
    steps = {step: [outcome.computed(member).get(step, []) for member in range(5)] for step in (6, 11)}
    for step, lost in ((6, 1), (11, 0)):
        survivors = [samples for member, samples in enumerate(steps[step]) if member != lost and samples]
        together = [sample for samples in survivors for sample in samples]
        assert len(together) == len(set(together)) == BATCH, f"step {step}: {steps[step]}"


@pytest.mark.needs_cuda
def test_survivors_go_on_after_kills_on_a_gpu_that_they_share(tmp_path: Path) -> None:
    (tmp_path / "gpu").touch()
    faults = (
        "kill rank 1 at step 6 in gradient",
        "kill rank 0 at step 11 in forward",
        "kill rank 3 at step 16 in update",
    )
    options = ("--on-loss", "shrink", "--share-gpu")
    outcome = run_job(tmp_path, *options, num_workers=5, faults=faults, checkpoints=True, timeout_s=110)
    check_as_undisturbed(outcome)
    assert [record["world"] for record in outcome.steps(2)][-1] == 2
    check_checkpoints(tmp_path / "checkpoints")


@pytest.mark.timeout(240)  # five interpreters, on a busy machine
def test_survivors_go_on_after_kills_in_an_update_in_a_save_and_in_a_recovery(tmp_path: Path) -> None:
    """The phases that the test above does not have; the matrix has each alone, on every backend."""
    faults = (
        "kill rank 0 at step 7 in forward",
        "kill rank 4 at step 7 in regroup",
        "kill rank 3 at step 11 in update",
        "kill rank 2 at step 14 in save",
    )
    job = run_job(tmp_path, "--on-loss", "shrink", num_workers=5, faults=faults, checkpoints=True, timeout_s=200)
    check_as_undisturbed(job)
    assert len({record["pid"] for record in job.steps(1)}) == 1
    assert job.output.count("is lost: signal 9") == 4, job.output
    check_checkpoints(tmp_path / "checkpoints")


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
@pytest.mark.parametrize("backend", ["gloo", "torsh"])
def test_a_joiner_gets_the_state_while_the_others_train(tmp_path: Path, backend: str) -> None:
    (tmp_path / "width").write_text("600")  # a megabyte and more of parameters: worth it

    def meanwhile(folder: Path) -> None:
        kill(wait_for_mark(folder, rank=1, step=5, within_s=60))
        wait_for_joined(folder, member=3)

    outcome = run_job(
        tmp_path, num_workers=3, num_steps=NUM_LONG_STEPS, is_slow=True, meanwhile=meanwhile, backend=backend
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS, width=600)
    assert "its state came while the others trained" in outcome.output, outcome.output
    assert len(outcome.weights()) == 3


@pytest.mark.matrix
@pytest.mark.timeout(280)  # two interpreters are started, one after the other, beside three ranks that compute
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_a_loss_while_a_joiner_gets_the_state(tmp_path: Path, victim: int) -> None:
    """The source of the state, another, or the joiner itself."""
    (tmp_path / "width").write_text("600")
    log = tmp_path / "faults.jsonl"

    def meanwhile(folder: Path) -> None:
        pids = {rank: wait_for_mark(folder, rank=rank, step=5, within_s=60) for rank in (0, 2)}
        pids[3] = wait_for_fault(log, "in stream")
        kill(pids[victim])
        wait_for_joined(folder, member=4)

    outcome = run_job(
        tmp_path,
        faults=("kill rank 1 at step 5", "delay rank 3 at step 0 in stream for 2 s"),
        num_steps=NUM_LONG_STEPS,
        is_slow=True,
        meanwhile=meanwhile,
        env={"TORSH_FAULT_LOG": str(log)},
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS, width=600)


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
        ("kill rank 1 at step 6 in gradient", "kill rank 2 at step 6 in regroup"),
        ("kill rank 1 at step 6", "kill rank 0 at step 6 in regroup", "kill rank 3 at step 6 in regroup"),
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
@pytest.mark.parametrize("point", ["start", "regroup"])
def test_a_joiner_that_dies_while_it_starts_or_enters_is_replaced_in_turn(tmp_path: Path, point: str) -> None:
    faults = ("kill rank 1 at step 20", f"kill rank 3 at step 0 in {point}")
    outcome = run_job(
        tmp_path,
        faults=faults,
        num_steps=NUM_LONG_STEPS,
        is_slow=True,
        meanwhile=lambda folder: wait_for_joined(folder, member=4),
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "worker 3" in outcome.output
    assert ("it had not joined" in outcome.output) == (point == "start")
    assert "worker 4 joined" in outcome.output


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_in_a_save_spoils_neither_training_nor_the_checkpoints(tmp_path: Path, victim: int) -> None:
    outcome = run_job(
        tmp_path, "--on-loss", "shrink", faults=(f"kill rank {victim} at step 14 in save",), checkpoints=True
    )
    check_as_undisturbed(outcome)
    assert "is lost: signal 9" in outcome.output
    check_checkpoints(tmp_path / "checkpoints")


@pytest.mark.matrix
def test_a_worker_that_dies_while_it_leaves_does_not_hold_up_the_others(tmp_path: Path) -> None:
    def meanwhile(folder: Path) -> None:
        pid = wait_for_mark(folder, rank=2, step=5, within_s=60)
        launcher = find_job("leaving").pid
        stop(pid)  # so it cannot get to the end of its step
        assert ask_launcher(launcher, "scale", workers=2)["is_done"]
        kill(pid)
        wait_for_mark(folder, rank=0, step=NUM_LONG_STEPS, within_s=60)

    outcome = run_job(tmp_path, "--rdzv-id", "leaving", num_steps=NUM_LONG_STEPS, is_slow=True, meanwhile=meanwhile)
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "worker 2 leaves after this step" in outcome.output
    assert "it was about to leave" in outcome.output
    assert sorted(outcome.weights()) == [0, 1]


@pytest.mark.matrix
def test_a_worker_that_was_to_leave_leaves_although_another_is_lost_meanwhile(tmp_path: Path) -> None:
    def meanwhile(folder: Path) -> None:
        pid = wait_for_mark(folder, rank=0, step=5, within_s=60)
        launcher = find_job("both").pid
        stop(pid)
        assert ask_launcher(launcher, "scale", workers=2)["is_done"]
        kill(pid)
        wait_for_mark(folder, rank=1, step=NUM_LONG_STEPS, within_s=60)

    outcome = run_job(
        tmp_path,
        *("--rdzv-id", "both", "--on-loss", "shrink"),
        num_steps=NUM_LONG_STEPS,
        is_slow=True,
        meanwhile=meanwhile,
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert list(outcome.weights()) == [1]


@pytest.mark.matrix
def test_a_spare_that_dies_is_no_loss(tmp_path: Path) -> None:
    def meanwhile(folder: Path) -> None:
        pid = wait_for_mark(folder, rank=1, step=5, within_s=60)
        launcher = find_job("spare").pid
        kill(wait_for_spare(launcher))
        kill(pid)
        wait_for_joined(folder, member=3)
        kill(wait_for_spare(launcher))
        wait_for_mark(folder, rank=0, step=NUM_LONG_STEPS, within_s=60)

    outcome = run_job(tmp_path, "--rdzv-id", "spare", num_steps=NUM_LONG_STEPS, is_slow=True, meanwhile=meanwhile)
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "worker 3 joined" in outcome.output
    assert outcome.output.count("is lost") == 1


@pytest.mark.matrix
def test_two_jobs_with_one_name_do_not_meet(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slow").touch()
    jobs = {
        name: start_job(tmp_path / name, "--rdzv-id", "twins", num_workers=2, faults=("kill rank 1 at step 8",))
        for name in ("one", "other")
    }
    try:
        for name in jobs:
            wait_for_mark(tmp_path / name, rank=0, step=10, within_s=60)
        with pytest.raises(JobNotFound, match="several jobs are named 'twins'"):
            find_job("twins")
        for name, job in jobs.items():
            (tmp_path / name / "slow").unlink()
            output, _ = job.communicate(timeout=60)
            check_as_undisturbed(ElasticOutcome(job.returncode, output, tmp_path / name, 0.0))
    finally:
        for job in jobs.values():
            if job.poll() is None:
                job.kill()
                job.communicate()


@pytest.mark.matrix
@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_jumps_loses_nobody(tmp_path: Path, jump_s: int) -> None:
    """Launcher and workers see the jump at once, in the middle of training, beside a loss."""

    def meanwhile(folder: Path) -> None:
        wait_for_mark(folder, rank=0, step=5, within_s=60)
        (folder / "jumped").touch()
        kill(wait_for_mark(folder, rank=1, step=20, within_s=60))
        wait_for_joined(folder, member=3)

    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(
        "import os, time\nreal = time.time\n"
        f"time.time = lambda: real() + {jump_s} * os.path.exists({str(tmp_path / 'jumped')!r})\n"
    )
    outcome = run_job(
        tmp_path,
        num_steps=NUM_LONG_STEPS,
        is_slow=True,
        meanwhile=meanwhile,
        checkpoints=True,
        env={"PYTHONPATH": f"{tmp_path / 'clock'}{os.pathsep}{ROOT}"},
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "worker 3 joined" in outcome.output
    assert outcome.output.count("is lost") == 1


@pytest.mark.matrix
def test_fewer_than_the_least_number_ends_a_job_that_shrinks_with_the_cause(tmp_path: Path) -> None:
    faults = ("kill rank 1 at step 8 in layer",)
    options = ("--on-loss", "shrink", "--min-workers", "3", "--max-restarts", "0")
    outcome = run_job(tmp_path, *options, faults=faults)
    assert outcome.code == 137, outcome.output
    assert "not in place: 2 of at least 3 workers are left" in outcome.output


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


@pytest.mark.matrix
def test_a_users_function_decides_on_the_number_of_workers_within_the_limits(tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text("99")

    def meanwhile(folder: Path) -> None:
        wait_for_joined(folder, member=2)
        (folder / "fewer").write_text("1")
        (folder / "fewer").replace(folder / "wanted")
        wait_for_mark(folder, rank=0, step=NUM_LONG_STEPS, within_s=60)

    outcome = run_job(
        tmp_path, "--max-workers", "3", num_workers=2, num_steps=NUM_LONG_STEPS, is_slow=True, meanwhile=meanwhile
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "3 workers are wanted now: load" in outcome.output
    assert "worker 2 joined: 3 workers" in outcome.output
    assert "1 workers are wanted now" in outcome.output
    assert list(outcome.weights()) == [0]
    for member in (1, 2):  # both finished their step before they left
        assert outcome.steps(member)[-1]["world"] == 3


@pytest.mark.matrix
def test_a_plan_scales_a_job_down_that_waits_for_data(tmp_path: Path) -> None:
    def wait_to_the_end(folder: Path) -> None:
        wait_for_mark(folder, rank=0, step=NUM_STEPS, within_s=60)

    (tmp_path / "pause").write_text("0.2")
    (tmp_path / "plan.json").write_text('{"elastic": {"scaling": "aggressive", "scaling_interval_s": 1.0}}')
    outcome = run_job(
        tmp_path,
        num_workers=2,
        is_slow=True,
        meanwhile=wait_to_the_end,
    )
    check_as_undisturbed(outcome)
    assert "1 workers are wanted now: load 0." in outcome.output
    assert list(outcome.weights()) == [0]


@pytest.mark.matrix  # as worlds are, in tests/train/test_assemble.py
def test_ranks_with_other_data_are_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "other-1.json").write_text('{"samples": 200}')
    outcome = run_job(tmp_path, "--max-restarts", "0", num_workers=2)
    assert outcome.code != 0, outcome.output
    assert "rank 0 has data {'samples': 240}, rank 1 has {'samples': 200}" in outcome.output
    assert not outcome.losses()


@pytest.mark.matrix
def test_ranks_that_evaluate_other_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "evaluate").touch()
    (tmp_path / "other-1.json").write_text('{"evaluated": 200}')
    outcome = run_job(tmp_path, "--max-restarts", "0", num_workers=2, num_steps=3)
    assert outcome.code != 0, outcome.output
    assert "rank 0 has data {'samples': 240}, rank 1 has {'samples': 200}" in outcome.output
    assert not outcome.weights()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("samples", "data {'samples': 240}, rank 1 has {'samples': 200}"),
        pytest.param("rate", "optimizer", marks=pytest.mark.matrix),
    ],
)
def test_one_that_joins_with_other_data_or_another_optimizer_is_refused(tmp_path: Path, other: str, said: str) -> None:
    (tmp_path / "other-2.json").write_text(json.dumps({other: {"samples": 200, "rate": 3.0}[other]}))
    (tmp_path / "pause").write_text("0.1")
    outcome = run_job(
        tmp_path,
        num_workers=2,
        num_steps=NUM_LONG_STEPS,
        is_slow=True,
        faults=("kill rank 1 at step 5 in forward",),
        meanwhile=lambda folder: wait_for_joined(folder, member=3),
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert f"the settings of one that joins differ: rank 0 has {said}" in outcome.output
    assert not outcome.steps(2)
