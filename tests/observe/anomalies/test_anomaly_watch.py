from __future__ import annotations

import pytest

from tests.observe.anomalies.labelled_series import score
from tests.observe.packets import FakeRank
from torsh_distributed.observe.anomalies import (
    MAX_ANOMALIES,
    AnomalyKind,
    AnomalyWatch,
    SpikeDetector,
    SustainedDetector,
)
from torsh_distributed.observe.job.job_view import JobView


@pytest.mark.parametrize("kind", AnomalyKind)
def test_precision_and_recall_on_labelled_series(kind: AnomalyKind) -> None:
    found = score(kind)
    print(f"{kind.value}: precision {found.precision:.2f}, recall {found.recall:.2f}")
    assert found.precision >= 0.9, found
    assert found.recall >= 0.9, found


def test_severity_uses_the_whole_scale() -> None:
    found = set()
    for factor in (1.8, 3, 8, 100):
        detector = SpikeDetector()
        for _ in range(30):
            detector.add(0.03)
        severity = detector.add(0.03 * factor)
        assert severity is not None
        found.add(round(severity))
    assert min(found) <= 3
    assert max(found) == 10


def test_an_episode_is_told_once() -> None:
    detector = SustainedDetector(0.5)
    told = [detector.add(value) for value in [0.9] * 40 + [0.1] * 40 + [0.9] * 40]
    assert [index for index, severity in enumerate(told) if severity is not None] == [9, 87]


def watched(steps: list[dict[str, float]], *, num_ranks: int = 2) -> AnomalyWatch:
    """A job whose ranks do these steps; a key with a rank's number in front is for that rank alone."""
    view = JobView()
    view.take({"type": "job", "world_size": num_ranks})
    watch = AnomalyWatch(view)
    ranks = [FakeRank(number) for number in range(num_ranks)]
    for step in steps:
        for number, rank in enumerate(ranks):
            own = {key.split(":")[-1]: value for key, value in step.items() if key[0] == str(number) or ":" not in key}
            memory = own.pop("memory", None)
            rank.step(**own)
            if memory is not None:
                rank.collector.metrics("torsh_host_memory_bytes").record(memory)
            view.take(rank.packet())
        watch.tick()
    return watch


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (AnomalyKind.PERFORMANCE_SPIKE, [{}] * 30 + [{"compute_s": 0.2}]),
        (AnomalyKind.PERFORMANCE_DEGRADATION, [{}] * 50 + [{"compute_s": 0.04}] * 30),
        (AnomalyKind.MEMORY_LEAK, [{"memory": 1e9 * (1 + n / 100)} for n in range(90)]),
        (AnomalyKind.COMMUNICATION_BOTTLENECK, [{"wait_s": 0.1}] * 25),
        (AnomalyKind.IO_BOTTLENECK, [{"data_s": 0.05}] * 25),
        (AnomalyKind.LOAD_IMBALANCE, [{"1:compute_s": 0.05}] * 25),
    ],
)
def test_a_job_that_has_it_is_told_so(kind: AnomalyKind, steps: list[dict[str, float]]) -> None:
    watch = watched(steps)
    found = {anomaly.kind for anomaly in watch.found}
    assert kind in found
    assert watch.values()["torsh_anomalies", (kind.value,)] >= 1
    assert all(anomaly.message for anomaly in watch.found)


def test_a_calm_job_has_none() -> None:
    assert watched([{"memory": 1e9}] * 80).found == []


def test_an_idle_gpu_is_named() -> None:
    view = JobView()
    watch = AnomalyWatch(view)
    rank = FakeRank(0)
    for _ in range(12):
        rank.collector.metrics("torsh_gpu_utilization_ratio", "3").record(0.2)
        view.take(rank.packet())
        watch.tick()
    (found,) = watch.found
    assert found.kind is AnomalyKind.GPU_UNDERUTILIZATION
    assert "GPU 3 of node-a idles" in found.message


def test_the_list_is_bounded() -> None:
    watch = AnomalyWatch(JobView())
    for _ in range(3 * MAX_ANOMALIES):
        watch._judge(AnomalyKind.IO_BOTTLENECK, "x", 0.9, "m")
        watch._detectors.clear()
        for _ in range(9):
            watch._judge(AnomalyKind.IO_BOTTLENECK, "x", 0.9, "m")
        watch._judge(AnomalyKind.IO_BOTTLENECK, "x", 0.9, "m")
    assert len(watch.found) == MAX_ANOMALIES
