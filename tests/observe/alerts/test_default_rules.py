"""The rules that come with the library: what they fire for, and that Prometheus would find what they look at."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.observe.packets import FakeRank
from torsh_distributed.observe.alerts import alert_rules
from torsh_distributed.observe.alerts.alert_manager import AlertManager
from torsh_distributed.observe.alerts.alert_rules import DEFAULT, expression, prometheus_rules, read_rules
from torsh_distributed.observe.export.prometheus_text import job_registry, render
from torsh_distributed.observe.job.job_view import JobView

FOR_PROMETHEUS = Path(alert_rules.__file__).with_name("default_rules.yml")
GAUGES = {
    # what is calm, what is not, and the rules that fire then
    "torsh_node_cpu_ratio": (0.5, 0.99, {"processors are full"}),
    "torsh_node_io_wait_ratio": (0.01, 0.4, {"processors wait for disks"}),
    "torsh_node_memory_ratio": (0.5, 0.98, {"memory runs short", "memory is full"}),
    "torsh_device_memory_fragmentation_ratio": (0.05, 0.5, {"device memory is fragmented"}),
    "torsh_gpu_utilization_ratio": (0.9, 0.02, {"a GPU idles"}),
    "torsh_wait_ratio": (0.1, 0.7, {"ranks wait for each other"}),
    "torsh_input_wait_ratio": (0.0, 0.3, {"ranks wait for data"}),
}
LOSSES = {"the loss rises", "the loss diverges", "the loss is no number"}


def falling(num_steps: int) -> Iterator[float]:
    """A loss that scatters by a tenth while it falls from 4 to 2."""
    for step in range(num_steps):
        yield 4 - 2 * step / num_steps + (-0.1, 0.1)[step % 2]


def job(*, calm: bool, losses: Iterator[float]) -> JobView:
    view, rank = JobView(), FakeRank(0)
    for loss in losses:
        rank.step(loss=loss)
    rank.collector.fold()
    for name, (low, high, _) in GAUGES.items():
        labels = ("0",) if name.startswith("torsh_gpu") else ()
        rank.collector.metrics(name, *labels).record(low if calm else high)
    rank.collector.metrics("torsh_gradient_norm").record(float("inf"))  # an overflow in fp16 is no alert
    view.take(rank.packet())
    return view


def fired(view: JobView) -> set[str]:
    manager = AlertManager(read_rules(DEFAULT)[0])
    manager.check(view, now=0)
    manager.check(view, now=3600)
    return {alert.name for alert in manager.firing}


def test_every_rule_fires_for_what_it_says_and_none_in_a_calm_job() -> None:
    assert fired(job(calm=True, losses=falling(200))) == set()
    of_gauges = set().union(*(names for _, _, names in GAUGES.values()))
    diverged = iter([*falling(200), *[2 + 0.1 * step for step in range(60)], float("nan")])
    assert fired(job(calm=False, losses=diverged)) == of_gauges | LOSSES
    assert {rule.name for rule in read_rules(DEFAULT)[0]} == of_gauges | LOSSES


def test_a_loss_that_only_scatters_or_rises_a_little_is_left_alone() -> None:
    flat = iter([2 + 0.1 * (-1, 0, 1)[step % 3] for step in range(500)])
    assert fired(job(calm=True, losses=flat)) == set()
    halfway = iter([*falling(200), *[3.3] * 60])
    assert fired(job(calm=True, losses=halfway)) == {"the loss rises"}


def test_prometheus_finds_every_series_that_a_rule_names() -> None:
    page, _ = render(job_registry(job(calm=True, losses=iter([*falling(30), float("nan")]))), "")
    samples = [one for family in text_string_to_metric_families(page.decode()) for one in family.samples]
    for rule in read_rules(DEFAULT)[0]:
        found = re.match(r"(\w+)", expression(rule))
        assert found is not None
        assert any(one.name == found[1] and rule.labels.items() <= one.labels.items() for one in samples), rule.name
    assert 'torsh_nonfinite_values_total{metric="torsh_loss"} > 0' in FOR_PROMETHEUS.read_text()


def test_the_file_for_prometheus_has_the_same_rules() -> None:
    """If it does not: `torsh metrics --alerts default > src/torsh_distributed/observe/alerts/default_rules.yml`."""
    assert FOR_PROMETHEUS.read_text() == prometheus_rules(read_rules(DEFAULT)[0])


@pytest.mark.needs_command("promtool")
def test_promtool_accepts_the_file() -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None
    subprocess.run([promtool, "check", "rules", str(FOR_PROMETHEUS)], check=True, capture_output=True)
