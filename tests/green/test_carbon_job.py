"""A real elastic job on a feed of its own: it trains, holds and goes on as the forecast says, and loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.faults import wait_for_mark
from tests.elastic.jobs import ElasticOutcome, start_job, undisturbed
from tests.green.nvml_stand_in import StandIn
from torsh_distributed.launch.local.exit_causes import SAVED_EXIT_CODE
from torsh_distributed.observe.job.run_files import EventFiles

pytestmark = pytest.mark.ranks

NUM_STEPS = 60
_SCRIPT = """
import os
from pathlib import Path
import torsh_distributed as td
from tests.elastic.training_script import main
from torsh_distributed import events

counter = Path(os.environ["NVML_STAND_IN"], "energy-0")

def count(event):
    \"\"\"A step takes 2 J of the stand-in GPU, which takes nothing while it waits.\"\"\"
    if event.rank == 0:
        counter.with_suffix(".new").write_text(str(int(counter.read_text()) + 2000))
        counter.with_suffix(".new").replace(counter)

events.subscribe(count, events.StepEvent)
main()
"""


class CarbonJob:
    """The job with its feed, in a folder."""

    def __init__(self, folder: Path, **green: object) -> None:
        self.folder = folder
        self.events = folder / "events"
        self.write_feed((3600.0, 300.0))
        # A step takes that long at least: a new feed is read, and heeded, within seconds, and the job must not be over.
        (folder / "slow").touch()
        (folder / "pause").write_text("0.25")
        (folder / "train.py").write_text(_SCRIPT)
        self.gpu = StandIn(folder / "nvml")
        self.gpu.write("energy-0", 0)
        values = {
            "enabled": True,
            "interval_s": 0.5,
            "node_full_w": 0.001,
            "carbon": "file",
            "carbon_file": str(folder / "feed.csv"),
            "strategy": "minimize_carbon",
            "deadline": "1h",
            "worker_efficiency": 1.0,
            **green,
        }
        rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        checkpoints = f'[checkpoint]\nenabled = true\ndir = "{folder}/checkpoints"\n'
        (folder / "plan.toml").write_text(f"{checkpoints}[green]\n{rows}")
        self.process: subprocess.Popen[str] | None = None

    def write_feed(self, *parts: tuple[float, float], share: float | None = None) -> None:
        """(seconds, g/kWh) from now on; the last one twice, for a row holds until the next."""
        moment, rows = time.time() - 1.0, []
        for seconds, value in (*parts, parts[-1]):
            rows.append(f"{datetime.fromtimestamp(moment, UTC).isoformat()},{value},{'' if share is None else share}")
            moment += seconds
        partial = self.folder / "feed.new"
        partial.write_text("\n".join(["time,g_per_kwh,renewable_share", *rows]) + "\n")
        partial.replace(self.folder / "feed.csv")

    def start(self, *options: str, num_workers: int = 2, num_steps: int = NUM_STEPS) -> subprocess.Popen[str]:
        plan = ("--plan", str(self.folder / "plan.toml"))
        self.process = start_job(
            self.folder,
            *plan,
            *options,
            num_workers=num_workers,
            num_steps=num_steps,
            checkpoints=True,
            env={"TORSH_EVENTS_DIR": str(self.events), **self.gpu.variables},
            script=self.folder / "train.py",
        )
        return self.process

    def decisions(self) -> list[dict[str, Any]]:
        return [one for one in self.records() if one["type"] == "schedule"]

    def records(self) -> list[dict[str, Any]]:
        paths = sorted(self.events.glob("launcher*"), key=lambda path: path.stat().st_mtime)
        lines = [line for path in paths for line in path.read_text().splitlines() if line.endswith("}")]
        return [json.loads(line) for line in lines]

    def wait(self, found: Callable[[], object], what: str, within_s: float = 90.0) -> None:
        deadline = time.monotonic() + within_s
        while not found():
            assert self.process is not None
            assert time.monotonic() < deadline, what
            assert self.process.poll() is None, f"the job ended: {what}: {self.process.communicate()[0]}"
            time.sleep(0.05)

    def wait_for_hold(self) -> int:
        """Until all ranks hold; the last step that was done. Ranks do not take another one meanwhile."""
        self.wait(lambda: self.decisions()[-1:] and self.decisions()[-1]["workers"] == 0, "no hold was decided")
        while True:
            before = self.last_step()
            time.sleep(1.0)
            if self.last_step() == before:
                return before

    def holds_since(self, moment: float) -> bool:
        """Whether rank 0 was told to hold, and was there. What a killed worker had not written yet does not count."""
        lines = [line for path in self.events.glob("rank-0*.jsonl") for line in path.read_text().splitlines()]
        holds = [json.loads(line) for line in lines if '"choice": "a hold' in line and line.endswith("}")]
        return any(one["time"] > moment for one in holds)

    def last_step(self) -> int:
        logs = [path.read_text().splitlines() for path in self.folder.glob("steps-*.jsonl")]
        return max((json.loads(log[-1])["step"] for log in logs if log and log[-1].endswith("}")), default=0)

    def finish(self) -> ElasticOutcome:
        assert self.process is not None
        (self.folder / "slow").unlink(missing_ok=True)
        output, _ = self.process.communicate(timeout=90)
        return ElasticOutcome(self.process.returncode, output, self.folder, 0.0)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def check_losses(outcome: ElasticOutcome, num_steps: int = NUM_STEPS) -> None:
    """As one process alone has them, which held nothing and lost nobody."""
    assert outcome.code == 0, outcome.output
    losses, _ = undisturbed(num_steps)
    found = outcome.losses()
    assert sorted(found) == list(range(1, num_steps + 1)), outcome.output
    torch.testing.assert_close(
        torch.tensor([found[step] for step in sorted(found)]), torch.tensor(losses), rtol=1e-4, atol=1e-6
    )


def test_a_job_holds_while_the_grid_is_dirty_survives_a_kill_there_and_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    job = CarbonJob(tmp_path)
    try:
        job.start("--on-loss", "shrink")
        wait_for_mark(tmp_path, rank=0, step=5, within_s=90)
        job.write_feed((600.0, 500.0), (3000.0, 50.0))
        held = job.wait_for_hold()
        assert held < NUM_STEPS
        saved = [int(path.name.partition("-")[2]) for path in (tmp_path / "checkpoints").glob("step-*")]
        assert held in saved, "a hold begins with a checkpoint"
        victim = json.loads((tmp_path / "steps-1.jsonl").read_text().splitlines()[-1])["pid"]
        os.kill(victim, signal.SIGKILL)
        # The world changes at the end of a step; then the one that is left holds again.
        job.wait(lambda: job.last_step() > held, "the survivor did not regroup")
        assert job.wait_for_hold() < NUM_STEPS
        job.write_feed((3600.0, 40.0))
        outcome = job.finish()
    finally:
        job.close()
    check_losses(outcome)
    assert outcome.output.count("training holds after step") == 2, outcome.output
    assert "training goes on (" in outcome.output
    spent = EventFiles(job.events).read_all().energy.summary()
    assert spent is not None
    assert spent.held_j > 0
    parts = spent.steps_j + spent.start_j + spent.failures_j + spent.undone_j + spent.skipped_j + spent.other_j
    assert parts + spent.held_j == pytest.approx(spent.total_j)
    actions = [one["action"] for one in job.decisions()]
    assert actions[:2] == ["train", "hold"]
    assert actions[2] in ("train", "reduce"), "one worker alone may take fewer joules than two"


@pytest.mark.slow
def test_a_hold_and_the_deadline_outlive_the_launcher_and_a_signal_in_a_hold_saves(tmp_path: Path) -> None:
    job = CarbonJob(tmp_path, max_kwh=1.0)
    try:
        launcher = job.start()
        wait_for_mark(tmp_path, rank=0, step=5, within_s=90)
        job.write_feed((600.0, 500.0), (3000.0, 50.0))
        held = job.wait_for_hold()
        launcher.kill()  # nobody has a chance to save: the hold has
        launcher.communicate()
        kept = json.loads((tmp_path / "checkpoints.energy.json").read_text())
        assert kept["budget"]["spent"]["energy"] > 0
        first, num_before = job.decisions()[-1], len(job.decisions())
        for path in tmp_path.glob("steps-*.jsonl"):
            path.rename(path.with_suffix(".first"))
        killed = time.time()
        again = job.start()
        job.wait(lambda: len(job.decisions()) > num_before, "no decision")
        assert job.decisions()[-1]["action"] == "hold"
        assert job.decisions()[-1]["deadline"] == first["deadline"]
        budgets = [one for one in job.records() if one["type"] == "budget"]
        assert budgets[-1]["spent"] >= kept["budget"]["spent"]["energy"]
        job.wait(lambda: job.holds_since(killed), "the workers did not hold again")
        assert job.last_step() == 0, "nothing is trained: the hold goes on"
        again.send_signal(signal.SIGTERM)
        outcome = job.finish()
        assert outcome.code == SAVED_EXIT_CODE, outcome.output
        job.write_feed((3600.0, 40.0))
        job.start()
        outcome = job.finish()
        assert outcome.code == 0, outcome.output
        assert not (tmp_path / "checkpoints.energy.json").exists(), "the next run is another"
    finally:
        job.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps-0.jsonl").read_text().splitlines()]
    # The signal came in the hold: one step, whose script was not told of it any more, and the checkpoint after it.
    assert steps == list(range(held + 2, NUM_STEPS + 1)), "no step was lost and none was done twice"


@pytest.mark.matrix
def test_workers_follow_the_renewable_share_of_the_grid(tmp_path: Path) -> None:
    """From two to one, to none, and back to two; the losses are those of one process."""
    num_steps = 400
    job = CarbonJob(tmp_path, strategy="maximize_renewable")
    job.write_feed((3600.0, 300.0), share=0.9)

    def worlds() -> list[int]:
        logs = sorted(tmp_path.glob("steps-*.jsonl"), key=lambda path: path.stat().st_mtime)
        return [json.loads(line)["world"] for line in logs[-1].read_text().splitlines() if line.endswith("}")]

    try:
        job.start("--min-workers", "1", num_steps=num_steps)
        wait_for_mark(tmp_path, rank=0, step=5, within_s=90)
        job.write_feed((3600.0, 300.0), share=0.3)
        job.wait(lambda: worlds()[-1:] == [1], "no worker left")
        job.write_feed((3600.0, 300.0), share=0.1)
        held = job.wait_for_hold()
        job.write_feed((3600.0, 300.0), share=0.9)
        job.wait(lambda: job.last_step() > held and worlds()[-1:] == [2], "no worker came back")
        outcome = job.finish()
    finally:
        job.close()
    check_losses(outcome, num_steps)
    assert [one["action"] for one in job.decisions()] == ["train", "reduce", "hold", "train"]


@pytest.mark.matrix
def test_a_hold_outlives_a_restart_of_all_workers_and_costs_no_step(tmp_path: Path) -> None:
    job = CarbonJob(tmp_path)
    try:
        job.start("--on-loss", "restart", "--max-restarts", "1")
        wait_for_mark(tmp_path, rank=0, step=5, within_s=90)
        job.write_feed((600.0, 500.0), (3000.0, 50.0))
        held = job.wait_for_hold()
        killed = time.time()
        os.kill(json.loads((tmp_path / "steps-1.jsonl").read_text().splitlines()[-1])["pid"], signal.SIGKILL)
        job.wait(lambda: job.holds_since(killed), "the workers did not hold again")
        assert job.last_step() == held, "those that were started again wait where the others did"
        job.write_feed((3600.0, 40.0))
        outcome = job.finish()
    finally:
        job.close()
    check_losses(outcome)
    steps = [one["step"] for one in outcome.steps(0)]
    assert steps == list(range(1, NUM_STEPS + 1)), "the hold began with a checkpoint: nothing was done twice"
