"""`torsh run --trace`, `torsh trace`, `torsh why` and `torsh tune` on a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.observe.trace.recorded import write_run
from torsh_distributed.cli.trace import trace_commands, tune_command, why_command
from torsh_distributed.errors import ConfigurationError, InvalidArgument

SCRIPT = """
import functools, os, time
import torch
import torsh_distributed as td

plan = td.Plan.from_env(os.environ)
td.init(plan)
torch.manual_seed(0)
engine = td.parallelize(
    torch.nn.Linear(64, 64), functools.partial(torch.optim.SGD, lr=0.01), plan, loss_fn=torch.nn.functional.mse_loss
)
for number in range(6):
    time.sleep(0.05 if td.rank() == 1 else 0.0)
    engine.step((torch.ones(8, 64), torch.zeros(8, 64)))
td.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_is_recorded_drawn_and_judged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", "--trace", "out", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "open it at https://ui.perfetto.dev" in done.stderr
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    drawn = {(one["pid"], one["name"]) for one in trace["traceEvents"] if one["ph"] == "X"}
    assert {(rank, name) for rank in (0, 1) for name in ("step 3", "forward", "backward")} <= drawn
    assert any(one["ph"] == "f" for one in trace["traceEvents"]), "collectives are linked"
    assert json.loads((tmp_path / "out" / "run.json").read_text())["arguments"] == ["--nproc-per-node", "2", "train.py"]
    told = CliRunner().invoke(why_command.app, [str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert "rank 1 comes last" in told.output


def test_merge_summary_and_why_read_any_folder_of_events(tmp_path: Path) -> None:
    write_run(tmp_path, num_ranks=3, compute_s={2: 0.09})
    runner = CliRunner()
    merged = runner.invoke(trace_commands.app, ["merge", str(tmp_path), "-o", str(tmp_path / "all.json.gz")])
    assert merged.exit_code == 0, merged.output
    assert "3 ranks" in merged.output
    assert (tmp_path / "all.json.gz").exists()
    summed = runner.invoke(trace_commands.app, ["summary", str(tmp_path)])
    assert "100.00 ms a step" in summed.output
    report = json.loads(runner.invoke(why_command.app, [str(tmp_path), "--json"]).output)
    assert [2] in [one["ranks"] for one in report["analysis"]["bottlenecks"]]
    assert report["recommendations"][0]["gain_s"] == pytest.approx(0.04, rel=0.01)


def test_tune_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    write_run(tmp_path, transfer_s=0.05)
    runner = CliRunner()
    assert isinstance(runner.invoke(tune_command.app, [str(tmp_path), "--apply", "9"]).exception, InvalidArgument)
    assert isinstance(runner.invoke(tune_command.app, [str(tmp_path), "--apply", "1"]).exception, ConfigurationError)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.6, "true: it is faster, as predicted"),
        (0.8, "true: it is faster, but by 50% of what was predicted"),
        (0.4, "true: it is faster, by 1.5 times what was predicted"),
        (2.0, "not true: it is slower"),
        (1.0, "not to be told apart"),
    ],
)
def test_the_verdict_is_the_measured_difference(factor: float, words: str) -> None:
    steps = [0.010, 0.0101, 0.0099, 0.0102, 0.0098, 0.010]
    before, after = tune_command.TunedRun(steps, None), tune_command.TunedRun([factor * one for one in steps], None)
    told, verdict = tune_command._verdict([before, before], [after, after], 0.004)
    assert words in verdict
    assert "4.00 ms predicted" in told


def test_rounds_that_differ_leave_doubt_and_larger_batches_count_by_the_sample() -> None:
    steps = [0.010, 0.0101, 0.0099, 0.0102, 0.0098, 0.010]
    slow = tune_command.TunedRun([1.5 * one for one in steps], None)
    quick = tune_command.TunedRun([0.9 * one for one in steps], None)
    as_it_was = tune_command.TunedRun(steps, None)
    _, verdict = tune_command._verdict([as_it_was, slow], [slow, quick], 0.004)
    assert "not to be told apart" in verdict, "one round said so, the other did not"
    before = tune_command.TunedRun(steps, 32)
    after = tune_command.TunedRun([1.6 * one for one in steps], 64)
    told, verdict = tune_command._verdict([before], [after], 0.002)
    assert "10.00 ms → 8.00 ms for 32 samples: +2.00 ms gained" in told
    assert verdict == "true: it is faster, as predicted"


SLOW_LOADING = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 14
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.ones(64)

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Slow()):
    time.sleep(0.1)
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.matrix  # four jobs, one after the other
@pytest.mark.slow
@pytest.mark.ranks
def test_a_recommendation_is_tried_and_its_gain_was_true(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_LOADING)
    write_run(tmp_path, num_ranks=1, data_s=0.1, compute_s={0: 0.09})
    how = {"arguments": ["--nproc-per-node", "1", "train.py"], "directory": str(tmp_path)}
    (tmp_path / "run.json").write_text(json.dumps(how))
    done = CliRunner().invoke(tune_command.app, [str(tmp_path), "--apply", "1", "--rounds", "1"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "load in processes of its own" in done.output
    assert "up to 100.00 ms predicted" in done.output
    assert "true: it is faster, as predicted" in done.output


PLAIN_SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("shm")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = torch.nn.MSELoss()
for number in range(12):
    time.sleep(0.05 if dist.get_rank() == 1 else 0.0)
    criterion(model(torch.ones(8, 64)), torch.zeros(8, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_without_a_word_of_this_library_is_recorded_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN_SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", "--trace", "out", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    told = CliRunner().invoke(why_command.app, [str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert "rank 1 comes last" in told.output
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    drawn = {(one["pid"], one["name"]) for one in trace["traceEvents"] if one["ph"] == "X"}
    assert {(rank, name) for rank in (0, 1) for name in ("step 5", "forward", "backward", "optimizer")} <= drawn
