"""`torsh tune`: run a recorded job both ways, as it was and with a recommended change, and say whether it helped."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torsh_distributed.cli.trace.trace_commands import RunFolder
from torsh_distributed.errors import ConfigurationError, InvalidArgument, ProcessFailure
from torsh_distributed.observe.bottlenecks.median_difference import median_difference, median_of
from torsh_distributed.unreadable_data import unreadable_as

if TYPE_CHECKING:
    from torsh_distributed.observe.bottlenecks.measured_gains import MeasuredGain
    from torsh_distributed.observe.bottlenecks.recommendation import Recommendation

RUN_FILE = "run.json"
_NEAR = 0.25

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class TunedRun:
    """What one run measured."""

    steps_s: list[float]
    """Seconds of each step after the first, from the end of the step before."""
    num_samples: float | None
    """Of a step, over all ranks; None if nobody told."""


@app.command()
def tune(
    run: RunFolder,
    apply: Annotated[
        int | None, typer.Option("--apply", min=1, help="Number of the recommendation of `torsh why RUN`.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is run, in turns.")] = 3,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Try plans for this model, named as for `torsh plan auto`."),
    ] = None,
    plans: Annotated[int, typer.Option("--plans", min=1, help="How many plans are tried; with --model.")] = 4,
) -> None:
    """Run a recorded job as it was and in other ways, in turns, and say what was gained.

    With --apply: with a recommended change, and whether its predicted gain was true. With --model: with the plans that
    are predicted to be the fastest on this machine; after every round the slower half is given up, and the one that is
    left is kept with its measured gain.
    """
    if (apply is None) == (model is None):
        raise InvalidArgument(
            "torsh tune tries a recommendation or other plans",
            hint=f"--apply 1 takes the first one of `torsh why {run}`; --model MODEL looks for plans",
        )
    if apply is not None:
        _try_advice(run, apply, rounds)
    elif model is not None:
        _try_plans(run, model, count=plans, rounds=rounds)


def _try_plans(run: Path, model: str, *, count: int, rounds: int) -> None:
    """The fastest plans by prediction, in turns with the run as it was."""
    from torsh_distributed.cli.trace.plan_trials import (
        AS_IT_WAS,
        halve,
        keep,
        predicted_plans,
        recorded_plan,
        with_plan,
    )
    from torsh_distributed.observe.trace.event_files import read_run

    recorded = _recorded(run)
    num_ranks = len(read_run(run).ranks)
    found = predicted_plans(model, recorded_plan(recorded), num_ranks=num_ranks, count=count)
    folder = run / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    ways = {AS_IT_WAS: recorded}
    for number, (name, plan) in enumerate(found.items(), 1):
        plan.save(folder / f"plan-{number}.toml", with_defaults=False)
        ways[name] = with_plan(recorded, folder / f"plan-{number}.toml")

    def trial(name: str, number: int) -> list[float]:
        return _run_once(ways[name], folder / f"way-{[*ways].index(name)}-{number}", {}).steps_s

    tuned = halve([*found], trial, rounds=rounds, tell=typer.echo)
    if tuned.best is None:
        raise ProcessFailure(
            "none of the plans ran", hint="; ".join(f"{name}: {why}" for name, why in tuned.given_up.items())
        )
    typer.echo(keep(tuned, found[tuned.best], folder))


def _try_advice(run: Path, apply: int, rounds: int) -> None:
    """A recommended change, in turns with the run as it was."""
    from torsh_distributed.observe.bottlenecks.bottleneck import analyse
    from torsh_distributed.observe.bottlenecks.measured_gains import keep_gain, measured_gains
    from torsh_distributed.observe.bottlenecks.recommendation import recommend

    advice = recommend(analyse(run))
    if not advice:
        raise InvalidArgument("there is nothing to try", hint=f"`torsh why {run}` has no recommendation for this run")
    if apply > len(advice):
        raise InvalidArgument(
            f"there is no recommendation {apply}",
            hint=f"`torsh why {run}` has {len(advice)}: --apply 1{f' to {len(advice)}' if len(advice) > 1 else ''}",
        )
    chosen = advice[apply - 1]
    measured_gains(run)  # a file that cannot be added to is reported before the runs, not after
    if not chosen.overrides:
        raise InvalidArgument(
            f"recommendation {apply} is nothing that a variable can change: {chosen.title}",
            hint="make that change by hand, record the run again and compare the two with `torsh why`",
        )
    recorded = _recorded(run)
    typer.echo(f"{chosen.title}: {', '.join(f'{name}={value}' for name, value in chosen.overrides.items())}")
    before: list[TunedRun] = []
    after: list[TunedRun] = []
    for number in range(rounds):
        for way, overrides, found in (("as it was", {}, before), ("changed", chosen.overrides, after)):
            folder = run / "tuning" / f"{way.replace(' ', '-')}-{number}"
            found.append(_run_once(recorded, folder, overrides))
            median_s = statistics.median(found[-1].steps_s)
            typer.echo(f"round {number + 1} of {rounds}, {way}: {median_s * 1e3:.2f} ms a step")
    for line in _verdict(before, after, chosen.gain_s, is_bound=chosen.is_bound):
        typer.echo(line)
    for line in chosen.plan_change.splitlines():
        typer.echo(f"  {line}")
    keep_gain(run, _measured(chosen, before, after))


def _recorded(run: Path) -> dict[str, Any]:
    path = run / RUN_FILE
    if not path.exists():
        raise ConfigurationError(
            "the run does not say how it was started",
            hint="record it with `torsh run --trace DIR`, which writes run.json",
            path=str(path),
        )
    with unreadable_as(ConfigurationError, "run.json does not say how a run was started", path=str(path)):
        recorded: dict[str, Any] = json.loads(path.read_bytes())
        variables = recorded.get("variables", {})
        texts = [recorded["directory"], *recorded["arguments"], *variables, *variables.values()]
        if not all(isinstance(one, str) for one in texts):
            raise ValueError("its arguments are not texts")
        return recorded


def _run_once(recorded: dict[str, Any], folder: Path, overrides: dict[str, str]) -> TunedRun:
    """Run the job once and read what it recorded."""
    from torsh_distributed.observe.bottlenecks.step_times import step_times
    from torsh_distributed.observe.trace.event_files import align_clocks, read_run

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", *recorded["arguments"]],
        cwd=recorded["directory"],
        env={**os.environ, **recorded.get("variables", {}), **overrides, "TORSH_EVENTS_DIR": str(folder.resolve())},
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
    # Ranks wait for each other: their steps are the same moments, and one of them tells all there is.
    found = next((steps for _, steps in sorted(step_times(events, align_clocks(events)).items()) if steps), [])
    if not found:
        raise ConfigurationError("the job recorded no steps", hint="it has to run at least three")
    samples = [one.num_samples for one in found if one.num_samples is not None]
    return TunedRun([one.step_s for one in found], statistics.fmean(samples) if samples else None)


def _difference(before: list[TunedRun], after: list[TunedRun]) -> tuple[float, list[list[float]], list[list[float]]]:
    """Seconds of each run's steps, and by what those with the change are multiplied.

    Steps with more samples count as so much shorter: what is compared is the time for the samples of a step as it was.
    """
    old, new = before[0].num_samples, after[0].num_samples
    scale = old / new if old and new else 1.0
    return scale, [one.steps_s for one in before], [[scale * step_s for step_s in one.steps_s] for one in after]


def _measured(chosen: Recommendation, before: list[TunedRun], after: list[TunedRun]) -> MeasuredGain:
    from torsh_distributed.observe.bottlenecks.measured_gains import MeasuredGain

    _, steps_before, steps_after = _difference(before, after)
    gain_s, low_s, high_s = median_difference(steps_before, steps_after)
    return MeasuredGain(
        title=chosen.title,
        variables=chosen.overrides,
        plan_change=chosen.plan_change,
        time=time.time(),
        rounds=len(before),
        was_s=median_of(steps_before),
        gain_s=gain_s,
        low_s=low_s,
        high_s=high_s,
        predicted_s=chosen.gain_s,
    )


def _verdict(
    before: list[TunedRun], after: list[TunedRun], predicted_s: float | None, *, is_bound: bool = False
) -> list[str]:
    """Whether it was true: the difference of medians with its interval, beside the prediction."""
    scale, steps_before, steps_after = _difference(before, after)
    gain_s, low_s, high_s = median_difference(steps_before, steps_after)
    was_s, is_s = median_of(steps_before), median_of(steps_after)
    per = "a step" if scale == 1.0 else f"for {before[0].num_samples:.0f} samples"
    told = f"{was_s * 1e3:.2f} ms → {is_s * 1e3:.2f} ms {per}: {gain_s * 1e3:+.2f} ms gained"
    told += f" (95 %: {low_s * 1e3:+.2f} to {high_s * 1e3:+.2f})"
    if predicted_s is not None:
        told += f", {'up to ' if is_bound else ''}{predicted_s * 1e3:.2f} ms predicted"
    if low_s > 0:
        verdict = "true: it is faster"
        if predicted_s and not (gain_s >= (1 - _NEAR) * predicted_s or high_s >= predicted_s):
            verdict += f", but by {gain_s / predicted_s:.0%} of what was predicted"
        elif predicted_s and gain_s > (1 + _NEAR) * predicted_s:
            verdict += f", by {gain_s / predicted_s:.1f} times what was predicted"
        elif predicted_s:
            verdict += ", as predicted"
    elif high_s < 0:
        verdict = "not true: it is slower; leave it as it is"
    else:
        verdict = (
            "not to be told apart: no difference beyond the noise. More --rounds tell more; a change of the plan needs "
            "a script that takes its plan from td.Plan.from_env(os.environ)"
        )
    return [told, verdict]
