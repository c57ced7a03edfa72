"""The job as Prometheus reads it: text format 0.0.4 and OpenMetrics, by prometheus-client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.observe.job.job_view import JobHeader, JobView, is_of_node
from torsh_distributed.observe.job.rank_view import DistributionSummary, RankView, Value
from torsh_distributed.observe.metrics.catalogue import BUCKETS_S, MetricDefinition, MetricKind
from torsh_distributed.observe.metrics.step_record import PARTS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as MetricFamily
    from prometheus_client.samples import Exemplar

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PART_OF = {f"torsh_{part}_seconds": f"{part}_s" for part in (*PARTS, "step", "busy")}
_BOUNDS = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]


class JobFamilies:
    """A collector of prometheus-client: the newest values of a JobView, at each scrape.

    Values carry the label `rank`, or `node` for those of a machine.
    """

    def __init__(self, view: JobView) -> None:
        self._view = view

    def collect(self) -> Iterator[MetricFamily]:
        """Every family that has a value."""
        found: dict[str, list[tuple[RankView | None, tuple[str, ...], Value]]] = {}
        with self._view.lock:
            for view, (name, labels), value in self._view.values():
                found.setdefault(name, []).append((view, labels, value))
            definitions = self._view.definitions()
        for (name, labels), number in self._view.job_values().items():
            found.setdefault(name, []).append((None, labels, number))
        for name, rows in sorted(found.items()):
            if name in definitions:
                yield _family(definitions[name], rows, self._view.header if self._view.is_traced else None)

    def describe(self) -> Iterable[MetricFamily]:
        """Nothing: prometheus-client would else collect to see the names."""
        return ()


def _family(
    definition: MetricDefinition, rows: list[tuple[RankView | None, tuple[str, ...], Value]], traced: JobHeader | None
) -> MetricFamily:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    place = "node" if is_of_node(definition) else "rank"
    is_of_job = rows[0][0] is None
    labels = [*(() if is_of_job else (place,)), *definition.labels]
    if definition.kind is MetricKind.DISTRIBUTION:
        histogram = HistogramMetricFamily(definition.name, definition.help, labels=labels)
        for view, values, value in rows:
            assert isinstance(value, DistributionSummary), "checked when it arrived"
            found = {} if view is None else exemplars(view, definition.name, traced)
            buckets = [
                (bound, float(count), found[number]) if number in found else (bound, float(count))
                for number, (bound, count) in enumerate(zip(_BOUNDS, accumulate(value.buckets), strict=True))
            ]
            histogram.add_metric(_labels(view, place, values), buckets=buckets, sum_value=value.total)
        return histogram
    kind = CounterMetricFamily if definition.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(definition.name, definition.help, labels=labels)
    for view, values, value in rows:
        number = value.last if isinstance(value, DistributionSummary) else value
        family.add_metric(_labels(view, place, values), number)
    return family


def exemplars(view: RankView, name: str, traced: JobHeader | None) -> dict[int, Exemplar]:
    """By bucket, the newest step of a rank that fell into it: which one it was, and its span if steps are traced."""
    from prometheus_client.samples import Exemplar

    part = _PART_OF.get(name)
    found: dict[int, Exemplar] = {}
    for step in reversed(view.steps) if part is not None else ():
        seconds = getattr(step, part or "")
        bucket = None if seconds is None else bisect_left(BUCKETS_S, seconds)
        if bucket is None or bucket in found:
            continue
        labels = {"step": str(step.step)}
        if traced is not None:
            labels |= {"trace_id": traced.trace_id, "span_id": traced.step_span_id(view.rank, step.step)}
        found[bucket] = Exemplar(labels, seconds, round(step.time, 3))
    return found


def _labels(view: RankView | None, place: str, values: tuple[str, ...]) -> list[str]:
    if view is None:
        return list(values)
    return [str(view.facts.get("node", "")) if place == "node" else str(view.rank), *values]


def job_registry(view: JobView) -> CollectorRegistry:
    """A registry of prometheus-client with the job alone; raises FeatureNotAvailable without the package."""
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise FeatureNotAvailable(
            "the metrics page needs prometheus-client", hint="pip install prometheus-client", feature="prometheus"
        ) from error
    registry = CollectorRegistry()
    registry.register(JobFamilies(view))
    return registry


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the format that the client accepts."""
    from prometheus_client import generate_latest
    from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics

    if "application/openmetrics-text" in accept:
        body: bytes = generate_open_metrics(registry)  # type: ignore[no-untyped-call]  # untyped there
        return body, OPEN_METRICS_TYPE
    return generate_latest(registry), TEXT_TYPE
