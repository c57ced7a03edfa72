"""The time of a segment's operations on a machine: by measured tables where there are any, else by single rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torsh_distributed.planner.machine.machine_profile import MachineProfile
from torsh_distributed.planner.machine.measured_rates import OperationRates, family_of
from torsh_distributed.planner.model.model_profile import OperationRow, SegmentProfile


@dataclass(frozen=True)
class RankShare:
    """How much of a segment one rank computes."""

    samples: float
    """Of a microbatch, over the ranks that split its sequences."""
    tp: int
    """Ranks that split the products."""
    moved: float
    """Share of the bytes of all other operations."""


@dataclass(eq=False)
class OperationTimes:
    """Computes times of segments, each once: a search asks for the same ones again and again."""

    machine: MachineProfile
    dtype: str
    _known: dict[tuple[int, RankShare, str], float] = field(default_factory=dict)

    def forward_s(self, segment: SegmentProfile, share: RankShare) -> float:
        """One forward of a segment, without communication."""
        return self._seconds(segment, share, "forward", segment.forward_rows)

    def backward_s(self, segment: SegmentProfile, share: RankShare) -> float:
        """One backward of a segment, without communication and recomputing."""
        return self._seconds(segment, share, "backward", segment.backward_rows)

    def cheap_s(self, segment: SegmentProfile, share: RankShare) -> float:
        """All of a forward but its products and attention."""
        return self._seconds(segment, share, "cheap", (row for row in segment.forward_rows if not row.flops.at(1)))

    def _seconds(self, segment: SegmentProfile, share: RankShare, what: str, rows: Iterable[OperationRow]) -> float:
        key = (id(segment), share, what)
        if key not in self._known:
            self._known[key] = self._rows_s(rows, share, is_backward=what == "backward")
        return self._known[key]

    def _rows_s(self, rows: Iterable[OperationRow], share: RankShare, *, is_backward: bool) -> float:
        """A device runs behind its host: it never takes less than its kernels take to launch. A CPU is the host."""
        rows, rates = list(rows), self.machine.rates
        launches = sum(row.count for row in rows)
        if rates is None:
            total = sum(row.count * self._described_s(row, share) for row in rows)
            return max(total, launches * self.machine.launch_s.value)
        total = sum(row.count * self._measured_s(row, share, rates) for row in rows)
        extra = launches * (rates.backward_launch_s if is_backward else rates.launch_s)
        return total + extra if self.machine.device_type == "cpu" else max(total, extra)

    def _described_s(self, row: OperationRow, share: RankShare) -> float:
        flops = row.flops.at(share.samples)
        if flops:
            rate = self.machine.flops.get(self.dtype) or self.machine.flops["bf16"]
            return flops / share.tp / rate.value
        return row.moved.at(share.samples) * share.moved / self.machine.memory_rate.value

    def _measured_s(self, row: OperationRow, share: RankShare, rates: OperationRates) -> float:
        flops = row.flops.at(share.samples) / share.tp
        dtype = self.dtype if self.dtype in rates.products else next(iter(rates.products))
        if row.name.startswith("attention"):
            name = f"{dtype} backward" if row.name.endswith("backward") else dtype
            return rates.attention[name].seconds_at(flops)
        if flops and row.shape is not None:
            _, m, n, k = (max(1.0, one.at(share.samples)) for one in row.shape)
            return flops / rates.products[dtype].rate(m, max(1.0, n / share.tp), k)
        if flops:
            return flops / max(rate for plane in rates.products[dtype].flops_per_s for line in plane for rate in line)
        family = rates.families[family_of(row.name)]
        return family.seconds_at(row.moved.at(share.samples) * share.moved)
