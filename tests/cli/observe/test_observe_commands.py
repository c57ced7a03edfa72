"""`torsh dashboard`, `top`, `compare` and `metrics`, from event files and from a page."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.test_app import torsh
from tests.observe.job.test_run_files import write_run
from tests.observe.packets import FakeRank, job_of_two
from torsh_distributed import events
from torsh_distributed.cli.observe import forecast
from torsh_distributed.cli.observe.top import drawing
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.page_state import page_state

pytestmark = pytest.mark.ranks


def test_a_finished_run_as_a_page_a_table_and_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "dashboard", str(folder), "--port", "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        address = re.search(r"dashboard at (http://127\.0\.0\.1:\d+/)", line)
        assert address, line
        with urllib.request.urlopen(address[1] + "state.json", timeout=20) as answer:
            assert json.loads(answer.read())["job"]["step"] == 20
        shown = torsh("top", address[1], "--once")
        assert shown.returncode == 0, shown.stderr
        assert "finished" in shown.stdout
        assert "step 20" in shown.stdout
        assert "33%" in shown.stdout
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 130
    finally:
        server.kill()
        server.communicate()
    from_files = torsh("top", str(folder), "--once")
    assert from_files.stdout == shown.stdout
    report = tmp_path / "report.html"
    done = torsh("dashboard", str(folder), "--report", str(report))
    assert done.stdout == f"report: {report}\n"
    assert '"state": "finished"' in report.read_text()


def test_the_terminal_shows_what_is_known_of_epochs_evaluations_and_the_end() -> None:
    view, rank = job_of_two(10), FakeRank(0)
    assert "left" not in shown(view), "nobody told how many steps there will be"
    for _ in range(10):
        rank.step(compute_s=0.9, wait_s=0.1)
    rank.collector.take(events.EvaluationEvent(step=10, loss=2.5, duration_s=0.1), now_s=200.0)
    rank.collector.metrics("torsh_epoch").record(2)
    rank.collector.metrics("torsh_gpu_utilization_ratio", "0").record(0.5)
    view, packet = JobView(), rank.packet()
    packet["facts"]["total_steps"] = 310
    view.take(packet)
    assert "epochs done 2  validation loss 2.5  GPUs busy 50%  left 5.0 min" in shown(view)


def shown(view: JobView) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(drawing(page_state(view)))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return text


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", step_s=0.06, wait_s=0.04)
    done = torsh("compare", str(one), str(other))
    assert done.returncode == 0, done.stderr
    assert re.search(r"step time +│ +30 ± .* ms │ +60 ± .* ms │ +\+100.0%", done.stdout), done.stdout
    rows = json.loads(torsh("compare", str(one), str(other), "--json").stdout)
    assert {row["what"]: row["difference"] for row in rows}["loss at the end"] == "within noise"


def test_what_is_measured_a_dashboard_and_rules_are_written(tmp_path: Path) -> None:
    assert "torsh_loss (gauge; rank): Mean loss" in torsh("metrics").stdout
    grafana = tmp_path / "grafana.json"
    assert torsh("metrics", "--grafana", str(grafana)).returncode == 0
    assert json.loads(grafana.read_text())["title"] == "torsh-distributed"
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nname = 'hot'\nmetric = 'torsh_loss'\nvalue = 5\n")
    assert "expr: torsh_loss > 5" in torsh("metrics", "--alerts", str(rules)).stdout


def test_mistakes_are_told_before_a_job_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')\n")
    wrong = torsh("run", "--export", "xml:file", str(script))
    assert wrong.returncode == 1
    assert "an export is written kind:target" in wrong.stderr
    missing = torsh("run", "--alerts", str(tmp_path / "absent.toml"), str(script))
    assert "the rules cannot be read" in missing.stderr
    assert "started" not in wrong.stdout + missing.stdout
    absent = torsh("dashboard", str(tmp_path / "none"))
    assert "there is no such directory of event files" in absent.stderr


def test_forecast_says_how_training_goes_and_when_it_arrives(tmp_path: Path) -> None:
    with (tmp_path / "rank-0.jsonl").open("w") as file:
        for step in range(1, 301):
            event = {"type": "step", "rank": 0, "time": 1000.0 + step, "step": step, "duration_s": 1.0}
            file.write(json.dumps({**event, "loss": 1.5 + 4 * step**-0.4, "num_samples": 8}) + "\n")
    runner = CliRunner()
    told = runner.invoke(forecast.app, [str(tmp_path), "--target-loss", "1.8", "--cost-per-hour", "3.6"])
    assert told.exit_code == 0, told.output
    assert "convergence: improving" in told.output
    assert "8 ± 0 samples/s" in told.output
    assert "loss 1.8: at step 6" in told.output
    assert "cost until then: 0.3" in told.output
    report = json.loads(runner.invoke(forecast.app, [str(tmp_path), "--json"]).output)
    assert report["forecast"] is None
    assert report["course"]["stability"]["num_spikes"] == 0
    reached = runner.invoke(forecast.app, [str(tmp_path), "--target-loss", "2.5"])
    assert "reached at step" in reached.output
    absent = runner.invoke(forecast.app, [str(tmp_path), "--target-loss", "0.1"])
    assert "no forecast, the target is below the floor" in absent.output


def test_forecast_says_what_is_a_risk_by_thresholds_that_can_be_set(tmp_path: Path) -> None:
    with (tmp_path / "rank-0.jsonl").open("w") as file:
        for step in range(1, 301):
            told = {"rank": 0, "time": 1000.0 + step, "step": step, "duration_s": 1.0}
            norm, rate = (1.0 if step < 290 else 30.0), 0.1
            done = {**told, "type": "step", "loss": 1.5 + 4 * step**-0.4, "grad_norm": norm, "learning_rate": rate}
            file.write(json.dumps(done) + "\n")
            if step % 30 == 0:
                loss = 2.0 + abs(step - 150) / 1000
                file.write(json.dumps({**told, "type": "evaluation", "loss": loss}) + "\n")
    runner = CliRunner()
    told = runner.invoke(forecast.app, [str(tmp_path)]).output
    assert "overfitting: overfitting, validation loss 2.15, 7.5% above its best of step 150" in told
    assert "gradients: exploding, norm 30, usually 1" in told
    assert "learning rate: effective, 0.1 of at most 0.1" in told
    tolerant = ["--overfitting-rise", "0.1", "--gradient-factor", "50", "--sure", "1e6", "--spent-rate", "2"]
    risks = json.loads(runner.invoke(forecast.app, [str(tmp_path), *tolerant, "--json"]).output)["risks"]
    assert [risks[name]["verdict"] for name in ("overfitting", "gradients", "learning_rate")] == [
        "none",
        "calm",
        "spent",
    ]
