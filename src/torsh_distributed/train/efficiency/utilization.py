"""How much of the hardware's arithmetic training uses: model FLOPs utilization (MFU), and what a step takes."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.loops.counted_operations import known_peak
from torsh_distributed.observe.metrics.process_metrics import process_metrics
from torsh_distributed.train.batches import Batch, count_samples
from torsh_distributed.train.engine import Engine


@dataclass(frozen=True, kw_only=True)
class UtilizationReport:
    """What steps took, as a mean over the ranks."""

    num_steps: int
    step_s: float
    """From the end of one step to the end of the next, with loading of data and all else in between."""

    samples_per_s: float
    """Over all ranks."""

    flops_per_s: float
    """Operations of forward and backward per second and rank; recomputation does not count as work."""

    mfu: float | None
    """`flops_per_s` over the device's peak in bf16, also where products are fp8; None where the peak is not known."""

    peak_bytes: int | None
    """Most memory allocated on a device, on the rank that needed the most; None on the CPU."""

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready."""
        return asdict(self)


class UtilizationMeter:
    """Measures steps of an Engine: `with UtilizationMeter(engine, batch) as meter:`, steps, then `meter.report()`.

    `batch` is this rank's share of a batch, whose operations are counted once by a forward; steps must have batches of
    its size. Nothing is added to the steps themselves. `peak_flops` is the device's, where its name is not known.
    Warm up before you measure: the first steps compile and allocate. Every rank uses it.
    """

    def __init__(self, engine: Engine, batch: Batch, *, peak_flops: float | None = None) -> None:
        self._engine = engine
        self._device = next(engine.unwrapped.parameters()).device
        self._peak_flops = peak_flops or known_peak(self._device)
        self._flops = engine.step_flops(batch)
        self._num_samples = count_samples(batch) * engine.strategy.data_degree
        self._started: tuple[float, int] | None = None
        self._ended: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._started, self._ended = self._now(), None
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = self._now()

    def report(self) -> UtilizationReport:
        """The report on the steps so far; every rank calls this."""
        ended = self._ended or self._now()
        if self._started is None or ended[1] == self._started[1]:
            raise InvalidArgument(
                "no step was measured", hint="with UtilizationMeter(engine, batch) as meter: engine.step(batch)"
            )
        num_steps = ended[1] - self._started[1]
        is_cuda = self._device.type == "cuda"
        mine = [
            (ended[0] - self._started[0]) / num_steps,
            self._flops,
            torch.cuda.max_memory_allocated(self._device) if is_cuda else 0,
        ]
        everyone = all_gather_object(mine)
        step_s = max(one[0] for one in everyone)
        flops_per_s = sum(one[1] for one in everyone) / len(everyone) / step_s
        mfu = None if self._peak_flops is None else flops_per_s / self._peak_flops
        process_metrics()("torsh_flops_per_second").record(flops_per_s)
        if mfu is not None:
            process_metrics()("torsh_mfu_ratio").record(mfu)
        return UtilizationReport(
            num_steps=num_steps,
            step_s=step_s,
            samples_per_s=self._num_samples / step_s,
            flops_per_s=flops_per_s,
            mfu=mfu,
            peak_bytes=max(int(one[2]) for one in everyone) if is_cuda else None,
        )

    def _now(self) -> tuple[float, int]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic(), self._engine.num_steps
