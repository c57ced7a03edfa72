from __future__ import annotations

import numpy as np
import pytest

from torsh_distributed.observe.metrics.catalogue import BUCKETS_S
from torsh_distributed.observe.metrics.sample_ring import SampleRing, SampleStatistics


def test_statistics_are_those_of_numpy() -> None:
    values = np.random.default_rng(3).lognormal(size=301)
    found = SampleStatistics.of(values.tolist())
    assert found is not None
    expected = (values.mean(), values.std(), values.min(), *np.percentile(values, [50, 95, 99]), values.max())
    assert (found.mean, found.std, found.low, found.median, found.p95, found.p99, found.high) == pytest.approx(expected)
    assert SampleStatistics.of([]) is None


def test_a_ring_keeps_the_newest_and_counts_all() -> None:
    ring = SampleRing(BUCKETS_S, size=4)
    for number in range(10):
        ring.add(number / 1000)
    assert ring.newest == (0.006, 0.007, 0.008, 0.009)
    assert (ring.count, ring.total) == (10, pytest.approx(0.045))
    # As Prometheus counts: a value on a bound belongs to the bucket below it.
    assert ring.bucket_counts[:6] == [1, 0, 1, 1, 3, 4]
    assert sum(ring.bucket_counts) == 10
