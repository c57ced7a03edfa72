"""What `torsh tune` measured is kept, and `torsh why` shows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.observe.trace.recorded import write_run
from torsh_distributed.cli.trace import tune_command, why_command
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.observe.bottlenecks.bottleneck import analyse
from torsh_distributed.observe.bottlenecks.measured_gains import keep_gain, measured_gains
from torsh_distributed.observe.bottlenecks.recommendation import recommend


def test_a_measured_gain_is_shown_with_its_advice_and_the_newest_counts(tmp_path: Path) -> None:
    write_run(tmp_path, data_s=0.06)
    chosen = recommend(analyse(tmp_path))[0]
    steps = [0.1, 0.101, 0.099, 0.102, 0.098, 0.1]
    before, slow = tune_command.TunedRun(steps, None), tune_command.TunedRun([1.1 * one for one in steps], None)
    quick = tune_command.TunedRun([0.5 * one for one in steps], None)
    for after in (slow, quick):
        keep_gain(tmp_path, tune_command._measured(chosen, [before, before], [after, after]))
    (kept,) = measured_gains(tmp_path)
    assert kept.gain_s == pytest.approx(0.05, rel=0.02)
    assert (kept.rounds, kept.predicted_s) == (2, chosen.gain_s)
    lines = CliRunner().invoke(why_command.app, [str(tmp_path)]).output.splitlines()
    at = next(number for number, line in enumerate(lines) if "load in processes of its own" in line)
    assert "measured by `torsh tune`: +50" in lines[at + 2]


def test_a_change_that_is_advised_no_more_was_tried_before(tmp_path: Path) -> None:
    write_run(tmp_path, data_s=0.06)
    chosen = dataclasses.replace(recommend(analyse(tmp_path))[0], title="eight loaders", overrides={"OTHER": "8"})
    steps = [0.1, 0.11, 0.09, 0.12, 0.08, 0.1]
    run = tune_command.TunedRun(steps, None)
    keep_gain(tmp_path, tune_command._measured(chosen, [run], [run]))
    told = CliRunner().invoke(why_command.app, [str(tmp_path)]).output
    assert "tried before: eight loaders: +0.00 ms of 100.00 ms a step" in told
    assert "not to be told from noise" in told


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "gains.json").write_text('[{"title": 3}]')
    with pytest.raises(ConfigurationError, match="measured gains cannot be read"):
        measured_gains(tmp_path)
