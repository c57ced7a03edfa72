"""Labelled series: for each kind of anomaly, some with it, from a known place on, and some that only look odd."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from torsh_distributed.observe.anomalies import MAKERS, AnomalyKind

_LENGTH = 240
_ONSET = 120


@dataclass(frozen=True)
class LabelledSeries:
    """Values, and where the anomaly begins; None if there is none."""

    values: list[float]
    onset: int | None


@dataclass(frozen=True)
class Score:
    """How well a detector did on all series of its kind."""

    num_right: int
    num_false: int
    num_missed: int

    @property
    def precision(self) -> float:
        return self.num_right / max(1, self.num_right + self.num_false)

    @property
    def recall(self) -> float:
        return self.num_right / max(1, self.num_right + self.num_missed)


def series_of(kind: AnomalyKind, *, count: int = 30) -> Iterator[LabelledSeries]:
    """`count` series with the anomaly and as many without, noise and size varied, the same at every call."""
    draw = random.Random(kind.value)
    for _ in range(count):
        noise = draw.choice([0.02, 0.05, 0.1])
        for is_bad in (True, False):
            make = _MAKERS[kind]
            yield LabelledSeries(make(draw, noise, is_bad), _ONSET if is_bad else None)


def score(kind: AnomalyKind) -> Score:
    """Run a fresh detector over each series: right if it reports within sixty values of the onset, and once."""
    right = false = missed = 0
    for series in series_of(kind):
        detector = MAKERS[kind]()
        reports = [index for index, value in enumerate(series.values) if detector.add(value) is not None]
        if series.onset is None:
            false += len(reports)
            continue
        timely = [index for index in reports if series.onset <= index <= series.onset + 60]
        right += bool(timely)
        missed += not timely
        false += len([index for index in reports if index < series.onset])
    return Score(right, false, missed)


def _times(draw: random.Random, noise: float) -> list[float]:
    return [0.03 * draw.lognormvariate(0, noise) for _ in range(_LENGTH)]


def _spike(draw: random.Random, noise: float, is_bad: bool) -> list[float]:
    values = _times(draw, noise)
    if is_bad:
        values[_ONSET] *= draw.uniform(2.5, 8)
    else:
        # A slow drift is no spike.
        values = [value * (1 + 0.3 * index / _LENGTH) for index, value in enumerate(values)]
    return values


def _degradation(draw: random.Random, noise: float, is_bad: bool) -> list[float]:
    values = _times(draw, noise)
    for index in range(_ONSET, _LENGTH):
        if is_bad:
            values[index] *= draw.uniform(1.3, 1.35) if noise < 0.1 else 1.5
        elif index % 40 == 0:
            values[index] *= 4  # single spikes are no degradation
    return values


def _leak(draw: random.Random, noise: float, is_bad: bool) -> list[float]:
    base = draw.uniform(2e8, 8e9)
    rate = draw.uniform(0.002, 0.01)
    values = []
    for index in range(_LENGTH):
        level = base * (1 + 0.3 * (1 - math.exp(-index / 5)))  # caches fill at first
        if is_bad:
            level *= 1 + rate * max(0, index - _ONSET)
        elif index >= _ONSET:
            level *= 1.2  # a jump, as when evaluation begins, is no leak
        values.append(level * (1 + 0.1 * noise * draw.gauss(0, 1)))
    return values


def _share(low: float, high: float, *, bad: tuple[float, float]) -> object:
    def make(draw: random.Random, noise: float, is_bad: bool) -> list[float]:
        usual, unusual = draw.uniform(low, high), draw.uniform(*bad)
        values = []
        for index in range(_LENGTH):
            level = unusual if is_bad and index >= _ONSET else usual
            if not is_bad and index % 9 == 0:
                level = unusual  # now and then is not lasting
            values.append(min(1.0, max(0.0, level * draw.lognormvariate(0, noise))))
        return values

    return make


_MAKERS = {
    AnomalyKind.PERFORMANCE_SPIKE: _spike,
    AnomalyKind.PERFORMANCE_DEGRADATION: _degradation,
    AnomalyKind.MEMORY_LEAK: _leak,
    AnomalyKind.COMMUNICATION_BOTTLENECK: _share(0.05, 0.35, bad=(0.6, 0.9)),
    AnomalyKind.GPU_UNDERUTILIZATION: _share(0.8, 0.98, bad=(0.05, 0.45)),
    AnomalyKind.IO_BOTTLENECK: _share(0.0, 0.12, bad=(0.28, 0.7)),
    AnomalyKind.LOAD_IMBALANCE: _share(0.01, 0.12, bad=(0.28, 0.8)),
}
