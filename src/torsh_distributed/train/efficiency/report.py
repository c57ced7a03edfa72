"""The efficiency report: how each rank spent the seconds of a step, and the mean over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_MUCH_WAITING, _MUCH_BUBBLE, _MUCH_TENSOR, _MUCH_DATA = 0.3, 0.3, 0.2, 0.1
"""Shares of a step above which a part is reported as a finding."""


@dataclass(frozen=True, kw_only=True)
class AxisTime:
    """What the groups along an axis of the mesh cost a rank in a step."""

    num_operations: float
    """Collectives, sends and receives."""

    num_bytes: float
    """Size of the tensors they filled on this rank; a reduce-scatter counts before the cut."""

    wait_s: float
    """Seconds the rank was blocked; communication that overlaps with computing counts as none."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The mean step: parts that add up to `step_s`, the time from the end of one step to the end of the next."""

    step_s: float
    compute_s: float
    """Forward and backward."""

    bubble_s: float
    """A pipeline rank has no microbatch to work on: it waits for another stage, or the schedule starts or ends."""

    optimizer_s: float
    """Clipping and update."""

    data_s: float
    """Waiting for the next batch of `engine.batches`."""

    other_s: float
    """Everything else between two steps: bookkeeping, evaluation, your own code."""

    axes: Mapping[str, AxisTime]
    """By axis; a group that spans several has a name such as `dp×shard`."""

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for communication along any axis."""
        return sum(axis.wait_s for axis in self.axes.values())

    @property
    def efficiency(self) -> float:
        """The share of a step in which the rank computed or updated."""
        return (self.compute_s + self.optimizer_s) / self.step_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, which add up to `step_s`."""
        waits = {f"waiting for {axis}": time.wait_s for axis, time in self.axes.items()}
        others = {"optimizer": self.optimizer_s, "data": self.data_s, "other": self.other_s}
        return {"compute": self.compute_s, **waits, "pipeline bubble": self.bubble_s, **others}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> StepTimes:
        """What `dataclasses.asdict` gave."""
        return cls(**{**record, "axes": {axis: AxisTime(**time) for axis, time in record["axes"].items()}})

    @classmethod
    def mean(cls, several: Sequence[StepTimes]) -> StepTimes:
        """The mean over ranks; an axis that a rank does not use counts as zero there."""
        names = ("step_s", "compute_s", "bubble_s", "optimizer_s", "data_s", "other_s")
        none = AxisTime(num_operations=0, num_bytes=0, wait_s=0)
        axes = {
            axis: AxisTime(
                **{
                    name: fmean(getattr(one.axes.get(axis, none), name) for one in several)
                    for name in ("num_operations", "num_bytes", "wait_s")
                }
            )
            for axis in dict.fromkeys(axis for one in several for axis in one.axes)
        }
        return cls(axes=axes, **{name: fmean(getattr(one, name) for one in several) for name in names})


@dataclass(frozen=True, kw_only=True)
class EfficiencyReport:
    """Where the time of a step goes, on every rank and on average."""

    num_steps: int
    """Steps that were measured."""

    equation: str
    """The mesh, as in `dp 2 × tp 2 = 4`."""

    ranks: tuple[StepTimes, ...]
    """By rank of the world."""

    @property
    def mean(self) -> StepTimes:
        """The mean over ranks."""
        return StepTimes.mean(self.ranks)

    @property
    def efficiency(self) -> float:
        """Parallel efficiency: the share of all ranks' time that went into computing and updating.

        The rest was lost to waiting, bubbles and data. Work that several ranks repeat counts as computing.
        """
        return sum(one.compute_s + one.optimizer_s for one in self.ranks) / sum(one.step_s for one in self.ranks)

    def findings(self) -> list[str]:
        """What stands out, with its numbers; empty if nothing does."""
        mean, found = self.mean, []
        if mean.wait_s > _MUCH_WAITING * mean.step_s:
            axis, time = max(mean.axes.items(), key=lambda item: item[1].wait_s)
            found.append(
                f"{mean.wait_s / mean.step_s:.0%} of a step is waiting for communication, most of it along {axis}"
                f" ({time.wait_s / mean.step_s:.0%}, {time.num_bytes / 2**20:.3g} MB a step)"
            )
        if mean.bubble_s > _MUCH_BUBBLE * mean.step_s:
            share = mean.bubble_s / mean.step_s
            found.append(f"{share:.0%} of a step is pipeline bubble: more microbatches or another schedule helps")
        tensor = mean.axes.get("tp")
        if tensor is not None and tensor.wait_s > _MUCH_TENSOR * mean.step_s:
            found.append(
                f"{tensor.wait_s / mean.step_s:.0%} of a step is waiting for tp: a smaller degree may be faster"
            )
        if mean.data_s > _MUCH_DATA * mean.step_s:
            found.append(f"{mean.data_s / mean.step_s:.0%} of a step is waiting for data: give the loader more workers")
        return found

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready."""
        return {
            "num_steps": self.num_steps,
            "equation": self.equation,
            "efficiency": self.efficiency,
            "findings": self.findings(),
            "mean": asdict(self.mean),
            "ranks": [asdict(one) for one in self.ranks],
        }

    def table(self) -> Table:
        """A table for people: the mean parts of a step, and the rank that spends most on each."""
        from rich.table import Table  # here: ranks that show no table do not import it

        mean = self.mean
        title = (
            f"{mean.step_s * 1e3:.1f} ms a step, parallel efficiency {self.efficiency:.0%}"
            f" ({self.equation}, {self.num_steps} steps)"
        )
        table = Table("where the time goes", title=title, title_justify="left")
        for name in ("ms a step", "share", "operations", "MB", "most"):
            table.add_column(name, justify="right")
        axes = {f"waiting for {axis}": time for axis, time in mean.axes.items()}
        for part, seconds in mean.parts.items():
            axis = axes.get(part)
            used = [f"{axis.num_operations:.4g}", f"{axis.num_bytes / 2**20:.3g}"] if axis else ["", ""]
            most_s, rank = max((one.parts.get(part, 0.0), -rank) for rank, one in enumerate(self.ranks))
            most = f"{most_s * 1e3:.1f} ms on rank {-rank}" if len(self.ranks) > 1 else ""
            table.add_row(part, f"{seconds * 1e3:.1f}", f"{seconds / mean.step_s:.1%}", *used, most)
        return table
