from __future__ import annotations

import math
import threading
import time

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.metrics.catalogue import CATALOGUE
from torsh_distributed.observe.metrics.rank_metrics import MAX_CUSTOM_METRICS, MAX_LABEL_SETS, RankMetrics


def test_kinds_add_up_as_they_say() -> None:
    metrics = RankMetrics()
    for value in (3, 1, 2):
        metrics("torsh_steps").record(value)
        metrics("torsh_loss").record(value)
        metrics("torsh_step_seconds").record(value / 100)
    rows = {name: row for name, _, row in metrics.summary()}
    assert rows["torsh_steps"] == 6
    assert rows["torsh_loss"] == 2
    assert (rows["torsh_step_seconds"]["n"], rows["torsh_step_seconds"]["stats"][3]) == (3, 0.02)


def test_what_is_no_finite_number_is_counted_apart() -> None:
    metrics = RankMetrics()
    loss = metrics("torsh_loss")
    for value in (1.5, math.nan, math.inf, "x", None):
        loss.record(value)  # type: ignore[arg-type]
    assert loss.value == 1.5
    assert ["torsh_nonfinite_values", ["torsh_loss"], 4] in metrics.summary()


def test_threads_lose_no_value() -> None:
    counter = RankMetrics()("torsh_steps")

    def record() -> None:
        for _ in range(20_000):
            counter.record(1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == 80_000


def test_names_and_label_sets_are_bounded() -> None:
    metrics = RankMetrics()
    for bad in ("", "9lives", "<script>", "a b", "x" * 200):
        with pytest.raises(InvalidArgument, match="a metric's name has letters"):
            metrics.custom(bad)
    with pytest.raises(InvalidArgument, match="kind must be one of counter, gauge, distribution"):
        metrics.custom("accuracy", kind="sum")
    for number in range(MAX_CUSTOM_METRICS):
        metrics.custom(f"metric_{number}")
    with pytest.raises(InvalidArgument, match="at most 200 custom metrics"):
        metrics.custom("one_more")
    for number in range(3 * MAX_LABEL_SETS):
        metrics("torsh_collectives", f"op{number}").record(1)
    rows = [labels for name, labels, _ in metrics.summary() if name == "torsh_collectives"]
    assert len(rows) == MAX_LABEL_SETS + 1
    assert ["other"] in rows


def test_a_metric_of_the_catalogue_keeps_its_labels() -> None:
    with pytest.raises(InvalidArgument, match="torsh_collectives has the labels"):
        RankMetrics()("torsh_collectives")


def test_the_catalogue_follows_prometheus() -> None:
    for name, definition in CATALOGUE.items():
        assert name.startswith("torsh_")
        assert definition.help.endswith(".")
        assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
        if definition.unit:
            assert f"_{definition.unit}" in name


def test_recording_is_cheap() -> None:
    metric = RankMetrics()("torsh_step_seconds")
    best_s = min(_seconds_of_10000(metric.record) for _ in range(5)) / 10_000
    assert best_s < 20e-6, "an append; the figure itself is the benchmark's"


def _seconds_of_10000(record: object) -> float:
    start = time.perf_counter()
    for _ in range(10_000):
        record(0.01)  # type: ignore[operator]
    return time.perf_counter() - start
