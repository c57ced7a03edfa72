"""What a person sees of `torsh demo`: a line every few steps, a summary, a loss curve."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.events import CheckpointEvent, CompileEvent, Event, StepEvent

_BAR_WIDTH = 24


@dataclass
class TrainReport:
    """Collects step events on rank 0 and says how training goes. Subscribe `handle` to StepEvent and CompileEvent."""

    total_steps: int
    log_every: int
    tokens_per_sample: int
    console: Console
    is_shown: Callable[[], bool] = lambda: True
    """Whether this rank says it: rank 0 may be another one after a while."""
    steps: list[StepEvent] = field(default_factory=list)
    num_skipped: int = 0
    started: float = field(default_factory=time.monotonic)

    def handle(self, event: Event) -> None:
        """Keep a step; print a line at the first, at every `log_every`-th and at the last, and for what is compiled."""
        if isinstance(event, CompileEvent):
            if not self.is_shown():
                return
            which = f" ({event.progress})" if event.progress else ""
            self.console.print(f"compiled {event.function}{which} in {event.duration_s:.1f} s", highlight=False)
            return
        assert isinstance(event, StepEvent)
        if event.is_skipped:
            self.num_skipped += 1
            return
        self.steps.append(event)
        is_due = event.step == 1 or event.step % self.log_every == 0 or event.step == self.total_steps
        if is_due and self.is_shown():
            self.console.print(self.line(event), highlight=False)

    def line(self, event: StepEvent) -> str:
        """Progress, loss, speed and the share of communication over the steps since the last line."""
        recent = self.steps[-self.log_every :]
        done = round(_BAR_WIDTH * event.step / self.total_steps)
        bar = "━" * done + "─" * (_BAR_WIDTH - done)
        share = comm_share(recent)
        return (
            f"step {event.step:>5}/{self.total_steps} {bar} loss {event.loss:7.4f}  "
            f"{self.tokens_per_s(recent):>9,.0f} tokens/s  {_mean_step_ms(recent):7.1f} ms/step"
            + ("" if share is None else f"  communicating {share:4.0%}")
        )

    def tokens_per_s(self, steps: list[StepEvent]) -> float:
        """Tokens of all ranks per second of stepping."""
        samples = sum(event.num_samples or 0 for event in steps)
        return samples * self.tokens_per_sample / sum(event.duration_s for event in steps)

    def summary(self, facts: dict[str, str]) -> Table:
        """The closing table: `facts` about the job first, then what was measured."""
        last = self.steps[-min(10, len(self.steps)) :]
        share = comm_share(self.steps)
        rows = {
            **facts,
            "steps": f"{len(self.steps)} in {time.monotonic() - self.started:.1f} s",
            "loss": f"{self.steps[0].loss:.4f} → {statistics.fmean(event.loss or 0 for event in last):.4f} "
            f"(mean of the last {len(last)})",
            "throughput": f"{self.tokens_per_s(self.steps):,.0f} tokens/s",
            "step time": f"{statistics.median(event.duration_s for event in self.steps) * 1e3:.1f} ms (median)",
        }
        if share is not None:
            rows["communicating"] = f"{share:.1%} of the time had gradients on their way"
        if self.num_skipped:
            rows["skipped"] = f"{self.num_skipped} steps overflowed fp16 and were tried again at half the loss scale"
        table = Table(show_header=False, title="summary", title_justify="left")
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def plot(self, path: Path, *, title: str) -> None:
        """Write the loss curve as a PNG; raises FeatureNotAvailable without matplotlib."""
        # Where HOME cannot be written, it says in two long lines that it keeps its cache elsewhere.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise FeatureNotAvailable(
                "the loss curve needs matplotlib",
                hint='pip install "torsh-distributed[plot]"',
                feature="plot",
            ) from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        curve = [(event.step, event.loss) for event in self.steps if event.loss is not None]
        axes.plot(*zip(*curve, strict=True), color="#2b6cb0", lw=1.4)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats)")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


@dataclass
class CheckpointStalls:
    """Collects how long training waited for checkpoints. Subscribe `handle` to CheckpointEvent."""

    directory: str
    stalled_s: list[float] = field(default_factory=list)

    def handle(self, event: Event) -> None:
        """Keep the wait of a save."""
        assert isinstance(event, CheckpointEvent)
        if event.action == "copied" and event.duration_s is not None:
            self.stalled_s.append(event.duration_s)

    def summary(self) -> str:
        """In words."""
        if not self.stalled_s:
            return "none"
        return f"{len(self.stalled_s)} in {self.directory}; training waited {sum(self.stalled_s) * 1e3:.0f} ms for them"


def comm_share(steps: list[StepEvent]) -> float | None:
    """The share of step time with gradients on their way, which overlaps with computing; None where it is not measured.

    It is not in pipelines without replicas, and not on a GPU.
    """
    measured = [event for event in steps if event.comm_s is not None]
    if not measured:
        return None
    return sum(event.comm_s or 0.0 for event in measured) / sum(event.duration_s for event in measured)


def _mean_step_ms(steps: list[StepEvent]) -> float:
    return statistics.fmean(event.duration_s for event in steps) * 1e3
