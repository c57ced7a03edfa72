"""How soon training goes on after a fault, for every kind of fault; and how much of it is left in a storm of kills."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos_jobs import NUM_RANKS, NUM_SAMPLES, ChaosRun, run_chaos
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from benchmarks.link_down_jobs import pull_cable
from tests.bed import needs
from torsh_distributed.elastic.faults.fault import Fault

_KINDS = {
    "SIGKILL in backward": (2, "kill rank {rank} at step {step} in backward"),
    "SIGKILL of rank 0": (0, "kill rank {rank} at step {step} in backward"),
    "SIGKILL in the update": (1, "kill rank {rank} at step {step} in optimizer"),
    "exception": (3, "raise rank {rank} at step {step} in forward"),
    "segmentation fault": (1, "segfault rank {rank} at step {step} in backward"),
    "SIGSTOP": (2, "stop rank {rank} at step {step} in forward"),
}
"""The first victim, and the fault."""
_WAITS_FOR_EVER = ("SIGSTOP",)
_WITH_REPLACEMENT = "SIGKILL in backward"
_EVERY = 75
"""Steps from one fault to the next: time for a replacement to join."""
_WORK_S = 0.02
_STORM_S = 2.0
_STORM = "storm"
_LINK = "link down"
_NUM_LINKS = 30


def _launchers() -> list[str]:
    """Ours first: in place where this version can, else by restarting; then torchrun."""
    from torsh_distributed.cli.run.command import run

    ours = "torsh run --elastic" if "elastic" in inspect.signature(run).parameters else "torsh run"
    return [ours, "torchrun"]


def faults_for(name: str, launcher: str, count: int) -> list[Fault]:
    """Faults of one kind, one after the other in one job.

    Where all restart, each is in its own attempt. Where the lost one is replaced, a new worker has a number of its own:
    the next victim is the replacement of the last, or whoever has become rank 0.
    """
    first, text = _KINDS[name]
    found = []
    for number in range(count):
        is_elastic = launcher == "torsh run --elastic"
        newest = number if first == 0 else NUM_RANKS - 1 + number
        rank = newest if is_elastic and number else first
        fault = text.format(rank=rank, step=_EVERY * (number + 1))
        found.append(Fault.parse(fault if is_elastic or not number else f"{fault} of attempt {number}"))
    return found


def _times(run: ChaosRun) -> list[float]:
    return [one.next_step_s for one in run.outcomes if one.next_step_s is not None]


def _after_fault(name: str, count: int, root: Path, launchers: list[str]) -> Iterator[Row | Note]:
    ours = launchers[0]
    found: dict[str, list[float]] = {}
    replaced: list[float] = []
    for launcher in launchers:
        # torchrun restarts everybody each time, and does not notice a stopped rank: a few times are enough to see it.
        few = count if launcher == ours else min(count, 3)
        if launcher != "torsh run --elastic" and name in _WAITS_FOR_EVER:
            yield Note(text=f"{name}: {launcher} waits until the collective's timeout; not measured")
            continue
        faults = faults_for(name, launcher, few)
        folder = root / f"{name} {launcher}".replace(" ", "-")
        restarts = 0 if launcher == "torsh run --elastic" else few
        num_steps = _EVERY * (few + 1)
        run = run_chaos(launcher, folder, faults=faults, num_steps=num_steps, restarts=restarts, work_s=_WORK_S)
        found[launcher] = _times(run)
        if launcher == "torsh run --elastic":
            replaced = [one.replaced_s for one in run.outcomes if one.replaced_s is not None]
        lost = sum(len(epoch.lost(range(NUM_SAMPLES))) for epoch in run.epochs[:-1])
        doubled = sum(len(epoch.doubled) for epoch in run.epochs)
        if run.exit_code != 0 or lost or doubled or len(run.outcomes) < few:
            yield Note(
                text=f"{name}, {launcher}: exit code {run.exit_code}, {len(run.outcomes)} of {few} faults happened,"
                f" {lost} samples lost, {doubled} doubled; last line: {run.output.strip().splitlines()[-1:]}"
            )
    if found.get(ours):
        rivals = {who: _with_p95(times) for who, times in found.items() if who != ours and times}
        yield Row(name=name, unit=Unit.SECONDS, ours=_with_p95(found[ours]), rivals=rivals)
        yield Note(text=f"{name}: {_percentiles(found[ours])}")
    if name == _WITH_REPLACEMENT and replaced:
        yield Row(name="a replacement has done a step", unit=Unit.SECONDS, ours=_with_p95(replaced))
        yield Note(text=f"{name}: until a replacement had done a step, {_percentiles(replaced)}")


def _link_down(root: Path) -> Iterator[Row | Note]:
    """Two ranks on each of two hosts; the cable of one is pulled."""
    missing = needs.netns()
    if missing:
        yield Note(text=f"{_LINK}: not measured here, {missing}")
        return
    found = [pull_cable(root / f"link-{number}", work_s=_WORK_S) for number in range(_NUM_LINKS)]
    noticed, next_step = [one.noticed_s for one in found], [one.next_step_s for one in found]
    yield Row(name=_LINK, unit=Unit.SECONDS, ours=_with_p95(next_step))
    yield Row(name=f"{_LINK}: noticed", unit=Unit.SECONDS, ours=_with_p95(noticed))
    yield Note(text=f"{_LINK}: next step {_percentiles(next_step)}; noticed {_percentiles(noticed)}")
    yield Note(text=f"{_LINK}: torchrun waits until the collective's timeout; not measured")


def _storm(lasts_s: float, root: Path) -> Iterator[Row | Note]:
    """Steps a second in a storm, beside the steps a second without."""
    ours, rival = _launchers()
    rates: dict[str, float] = {}
    for launcher in (ours, rival):
        calm = run_chaos(launcher, root / f"calm-{launcher}", num_steps=10**6, work_s=_WORK_S, lasts_s=lasts_s / 4)
        run = run_chaos(
            launcher,
            root / f"storm-{launcher}",
            num_steps=10**6,
            work_s=_WORK_S,
            restarts=1000,
            storm_s=_STORM_S,
            lasts_s=lasts_s,
        )
        calm_rate = calm.num_steps / calm.seconds if calm.seconds else 0.0
        rates[launcher] = run.num_steps / lasts_s
        lost = sum(len(epoch.lost(range(NUM_SAMPLES))) for epoch in run.epochs[:-1])
        doubled = sum(len(epoch.doubled) for epoch in run.epochs)
        share = rates[launcher] / calm_rate if calm_rate else 0.0
        yield Note(
            text=f"storm, {launcher}: a kill every {_STORM_S:g} s for {lasts_s:g} s, {len(run.outcomes)} kills, goodput"
            f" {100 * share:.0f} % of {calm_rate:.0f} steps/s, {lost} samples lost, {doubled} doubled"
        )
    one = {who: Measurement(median=rate, low=rate, high=rate, num_samples=1) for who, rate in rates.items()}
    yield Row(name="steps in a storm of kills", unit=Unit.PER_SECOND, ours=one[ours], rivals={rival: one[rival]})


def _rows(budget: Budget) -> Iterator[Row | Note]:
    yield Note(text=f"ours is `{_launchers()[0]}`; a number is the median, its upper end the 95th percentile")
    with tempfile.TemporaryDirectory(prefix="torsh-chaos-") as folder:
        root = Path(folder)
        if budget.is_quick:
            yield from _after_fault(next(iter(_KINDS)), 1, root, _launchers()[:1])
            return
        for name in filter(budget.wants, _KINDS):
            yield from _after_fault(name, 50, root, _launchers())
        if budget.wants(_LINK):
            yield from _link_down(root)
        if budget.wants(_STORM):
            yield from _storm(60.0, root)


def _with_p95(samples: list[float]) -> Measurement:
    ordered = sorted(samples)
    whole = Measurement.of(ordered)
    high = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return Measurement(
        median=whole.median, low=whole.low, high=high, num_samples=whole.num_samples, samples=tuple(samples)
    )


def _percentiles(samples: list[float]) -> str:
    found = _with_p95(samples)
    return (
        f"median {found.median * 1e3:.0f} ms, 95th percentile {found.high * 1e3:.0f} ms, longest"
        f" {max(samples) * 1e3:.0f} ms of {found.num_samples}"
    )


CASE = Case(
    title="Chaos: from a fault to the next step",
    about="""Four ranks train a small model with an Engine; one of them is hit at a chosen point of a step. Seconds
    until the next step is done by any rank. Ours goes on in place where this version can, torchrun restarts all
    workers from the newest checkpoint. Then a storm: a random worker is killed every two seconds. The samples of all
    committed steps are counted: none may be lost or doubled.""",
    rows=_rows,
    parts=(*_KINDS, _LINK, _STORM),
)
