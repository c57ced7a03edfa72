"""`torsh trace`: one timeline of all ranks from recorded events, and what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.observe.bottlenecks.bottleneck import Bottleneck, RunAnalysis
from torsh_distributed.observe.bottlenecks.recommendation import Recommendation

if TYPE_CHECKING:
    from torsh_distributed.observe.bottlenecks.measured_gains import MeasuredGain

_LABELS = {
    "compute": "computing",
    "transfer": "transferring",
    "sync": "waiting for late ranks",
    "data": "loading",
    "optimizer": "updating",
    "bubble": "pipeline bubble",
    "other": "between phases",
}

_UNKNOWN = "gain unknown before `torsh tune` has measured it"


def summary_lines(found: RunAnalysis) -> list[str]:
    """Where the time goes."""
    lines = [f"{found.num_ranks} ranks, {found.num_steps} steps after the first, {found.step_s * 1e3:.2f} ms a step"]
    for part, label in _LABELS.items():
        seconds = found.parts[part]
        if seconds / found.step_s >= 0.005:
            lines.append(f"  {label:<22} {seconds * 1e3:9.2f} ms  {seconds / found.step_s:6.1%}")
    lines.append("rank   compute      wait      data  optimizer     other   came last   delayed the others")
    for rank, parts in sorted(found.by_rank.items()):
        numbers = "".join(f"{parts[part] * 1e3:10.2f}" for part in ("compute", "wait", "data", "optimizer", "other"))
        late = found.arrivals
        last = f"{late.last_share.get(rank, 0.0):10.0%}"
        lines.append(f"{rank:>4}{numbers}{last}  {late.delay_s.get(rank, 0.0) / found.num_steps * 1e3:9.2f} ms a step")
    return lines


def bottleneck_lines(found: RunAnalysis) -> list[str]:
    """What holds the run up."""
    if not found.bottlenecks:
        return ["nothing stands out: no part takes a tenth of the step by itself"]
    return [f"{one.kind.value}: {_weight(one)}{one.evidence}" for one in found.bottlenecks]


def _weight(one: Bottleneck) -> str:
    if not one.seconds:
        return ""  # what is short of memory takes no time of its own
    return f"{one.share:.0%} of the step ({one.severity}, confidence {one.confidence:.2f}); "


def _gain(one: Recommendation, step_s: float) -> str:
    most = "up to " if one.is_bound else ""
    gains = []
    if one.gain_s:
        gains.append(f"{most}{one.gain_s * 1e3:.2f} ms a step, {most}{one.gain_s / step_s:.0%}")
    if one.gain_bytes is not None:
        gains.append(f"{one.gain_bytes / 2**30:.2f} GiB less of a rank's peak")
    return "; ".join(gains) or _UNKNOWN


def recommendation_lines(
    advice: Iterable[Recommendation], step_s: float, measured: Sequence[MeasuredGain] = ()
) -> list[str]:
    """What to do, numbered as `torsh tune --apply` takes it, with what `torsh tune` has measured of it."""
    lines = []
    tried = {tuple(sorted(one.variables.items())): one for one in measured}
    for number, one in enumerate(advice, 1):
        lines.append(f"{number}. {one.title}: {_gain(one, step_s)} (confidence {one.confidence:.2f})")
        lines.append(f"   {one.reckoning}")
        gain = tried.pop(tuple(sorted(one.overrides.items())), None)
        if gain is not None:
            lines.append(f"   measured by `torsh tune`: {gain.in_words}")
        if one.caution:
            lines.append(f"   {one.caution}")
        lines += [f"   {line}" for line in one.plan_change.splitlines()]
    lines = lines or ["no change is worth a recommendation"]
    return lines + [f"tried before: {one.title}: {one.in_words}" for one in tried.values()]


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Make timelines of recorded runs, and sum them up.")

RunFolder = Annotated[
    Path, typer.Argument(help="Directory of `torsh run --trace`, or of TORSH_EVENTS_DIR.", exists=True, file_okay=False)
]
LimitMb = Annotated[
    float, typer.Option("--limit-mb", min=0.1, help="Most megabytes; the shortest slices are left out.")
]


@app.command()
def merge(
    run: RunFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The trace; .json or .json.gz. Default: trace.json in RUN.")
    ] = None,
    limit_mb: LimitMb = 200.0,
) -> None:
    """Merge the events of all ranks, and profiles of torch.profiler beside them, into one timeline for Perfetto."""
    typer.echo(merged(run, output or run / "trace.json", limit_mb=limit_mb))


def merged(run: Path, target: Path, *, limit_mb: float) -> str:
    """Write the trace; a line about it."""
    from torsh_distributed.observe.trace.trace_file import write_trace

    found = write_trace(run, target, limit_mb=limit_mb)
    left_out = f", the {found.num_dropped} shortest left out" if found.num_dropped else ""
    profiles = f", {found.num_profiles} profiles of torch joined" if found.num_profiles else ""
    error = f", clocks aligned to ±{found.clock_error_s * 1e6:.0f} µs" if found.clock_error_s else ""
    return (
        f"{found.path}: {found.num_slices} slices of {found.num_ranks} ranks{left_out}, {found.num_links} collectives "
        f"linked{profiles}{error}; open it at https://ui.perfetto.dev"
    )


@app.command()
def summary(run: RunFolder) -> None:
    """Say where the steps of a recorded run went, rank by rank, and who comes late."""
    from torsh_distributed.observe.bottlenecks.bottleneck import analyse

    typer.echo("\n".join(summary_lines(analyse(run))))
