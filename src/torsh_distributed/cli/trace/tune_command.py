"""`torsh tune`: run a recorded job both ways, as it was and with a recommended change, and say whether it helped."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from torsh_distributed.cli.trace.trace_commands import RunFolder
from torsh_distributed.errors import ConfigurationError, InvalidArgument, ProcessFailure

RUN_FILE = "run.json"
_RESAMPLES = 2000

app = typer.Typer(add_completion=False)


@app.command()
def tune(
    run: RunFolder,
    apply: Annotated[int, typer.Option("--apply", min=1, help="Number of the recommendation of `torsh why RUN`.")],
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is run, in turns.")] = 2,
) -> None:
    """Run a recorded job as it was and with a recommended change, and say whether the predicted gain was true."""
    from torsh_distributed.observe.bottlenecks.bottleneck import analyse
    from torsh_distributed.observe.bottlenecks.recommendation import recommend

    found = analyse(run)
    advice = recommend(found)
    if apply > len(advice):
        raise InvalidArgument(
            f"there is no recommendation {apply}", hint=f"`torsh why {run}` has {len(advice)}", given=apply
        )
    chosen = advice[apply - 1]
    if not chosen.overrides:
        raise InvalidArgument(
            f"recommendation {apply} is no change of the plan: {chosen.title}",
            hint="make that change by hand, record the run again and compare the two with `torsh why`",
        )
    recorded = _recorded(run)
    durations: dict[str, list[float]] = {"as it was": [], "changed": []}
    for number in range(rounds):
        for way, overrides in (("as it was", {}), ("changed", chosen.overrides)):
            folder = run / "tuning" / f"{way.replace(' ', '-')}-{number}"
            typer.echo(f"round {number + 1} of {rounds}, {way}")
            durations[way] += _step_times(recorded, folder, overrides)
    for line in _verdict(durations["as it was"], durations["changed"], chosen.gain_s, chosen.title):
        typer.echo(line)
    for line in chosen.plan_change.splitlines():
        typer.echo(f"  {line}")


def _recorded(run: Path) -> dict[str, Any]:
    path = run / RUN_FILE
    if not path.exists():
        raise ConfigurationError(
            "the run does not say how it was started",
            hint="record it with `torsh run --trace DIR`, which writes run.json",
            path=str(path),
        )
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded


def _step_times(recorded: dict[str, Any], folder: Path, overrides: dict[str, str]) -> list[float]:
    """Run the job once; the seconds of each of its steps after the first, over all ranks."""
    from torsh_distributed.observe.trace.event_files import read_run

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", *recorded["arguments"]],
        cwd=recorded["directory"],
        env={**os.environ, **overrides, "TORSH_EVENTS_DIR": str(folder.resolve())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProcessFailure(
            f"the job failed with exit code {done.returncode}",
            hint="its last lines: " + " / ".join(done.stderr.splitlines()[-3:]),
        )
    events = read_run(folder)
    by_rank: dict[int, list[float]] = {}
    for rank, record in events.of("step"):
        by_rank.setdefault(rank, []).append(record["duration_s"])
    return [seconds for steps in by_rank.values() for seconds in steps[1:]]


def _verdict(before: list[float], after: list[float], predicted_s: float, title: str) -> list[str]:
    """Whether it was true: the difference of medians with its interval, beside the prediction."""
    if not before or not after:
        raise ConfigurationError("the job recorded no steps", hint="it has to run at least two steps on td.Engine")
    gain_s, low_s, high_s = _difference(before, after)
    told = (
        f"{title}: {statistics.median(before) * 1e3:.2f} ms → {statistics.median(after) * 1e3:.2f} ms a step; "
        f"{gain_s * 1e3:+.2f} ms gained (95 %: {low_s * 1e3:+.2f} to {high_s * 1e3:+.2f}), "
        f"{predicted_s * 1e3:.2f} ms predicted"
    )
    if low_s > 0:
        verdict = "true: it is faster" + (
            "" if gain_s >= predicted_s / 2 else ", but by less than half of what was said"
        )
    elif high_s < 0:
        verdict = "not true: it is slower; leave the plan as it is"
    else:
        verdict = "not to be told apart: no difference beyond the noise; does the script read the plan (Plan.from_env)?"
    return [told, verdict]


def _difference(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """Median before minus median after, and its 95 % interval by resampling."""
    source = random.Random(0)
    differences = sorted(
        statistics.median(source.choices(before, k=len(before)))
        - statistics.median(source.choices(after, k=len(after)))
        for _ in range(_RESAMPLES)
    )
    low, high = differences[int(0.025 * _RESAMPLES)], differences[int(0.975 * _RESAMPLES) - 1]
    return statistics.median(before) - statistics.median(after), low, high
