"""Metrics for OpenTelemetry, sent by its own exporter: OTLP over HTTP, to any collector.

The exporter also reads the variables that OpenTelemetry has for it, such as OTEL_EXPORTER_OTLP_HEADERS. The package is
an extra, so this module is imported by name, by the registry of exporters.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from typing_extensions import override

from torsh_distributed.log_level import said_to_log
from torsh_distributed.observe.export.base import ExportedValue, Exporter, exported_values, http_url
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.rank_view import DistributionSummary
from torsh_distributed.observe.metrics.catalogue import BUCKETS_S, MetricKind

TIMEOUT_S = 5.0
"""For one export, the package's own tries included; ours follow every ten seconds."""
SCOPE = InstrumentationScope("torsh_distributed")
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "watts": "W", "joules": "J"}


class OtlpMetrics(Exporter):
    """Posts to `endpoint`/v1/metrics every ten seconds: counters as sums, distributions as histograms."""

    interval_s = 10.0

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPMetricExporter(endpoint=signal_url(endpoint, "metrics"), timeout=TIMEOUT_S)
        self._started_ns = time.time_ns()

    @override
    def export(self, view: JobView) -> None:
        send(self._exporter, _metrics_data(view, started_ns=self._started_ns))


def signal_url(endpoint: str, signal: str) -> str:
    """Where a collector takes a signal; `endpoint` may name it or leave it out."""
    url = http_url(endpoint).rstrip("/")
    return url if url.endswith(f"/v1/{signal}") else f"{url}/v1/{signal}"


def send(exporter: Any, batch: Any) -> None:
    """Export by an exporter of the package; raises OSError with the reason unless the collector takes it."""
    with said_to_log(type(exporter).__module__) as said:
        result = exporter.export(batch)
    if result.name != "SUCCESS":
        raise OSError(": ".join(["the collector did not take it", *said[:1]]))


@functools.cache  # one object for the spans of a job: they are grouped by it
def job_resource(run_id: str) -> Resource:
    """What the signals of a job are about."""
    return Resource({"service.name": "torsh", "torsh.run_id": run_id})


def _metrics_data(view: JobView, *, started_ns: int) -> MetricsData:
    by_name: dict[str, list[ExportedValue]] = {}
    for one in exported_values(view):
        by_name.setdefault(one.definition.name, []).append(one)
    now_ns = time.time_ns()
    metrics = [_metric(values, started_ns=started_ns, now_ns=now_ns) for values in by_name.values()]
    scope = ScopeMetrics(scope=SCOPE, metrics=metrics, schema_url="")
    return MetricsData(
        [ResourceMetrics(resource=job_resource(view.header.run_id), scope_metrics=[scope], schema_url="")]
    )


def _metric(values: list[ExportedValue], *, started_ns: int, now_ns: int) -> Metric:
    definition = values[0].definition
    points = [_point(one, start_time_unix_nano=started_ns, time_unix_nano=now_ns) for one in values]
    data: Any = Gauge(data_points=points)
    if definition.kind is MetricKind.DISTRIBUTION:
        data = Histogram(data_points=points, aggregation_temporality=AggregationTemporality.CUMULATIVE)
    elif definition.kind is MetricKind.COUNTER:
        data = Sum(data_points=points, aggregation_temporality=AggregationTemporality.CUMULATIVE, is_monotonic=True)
    unit = _UNITS.get(definition.unit, definition.unit)
    return Metric(name=definition.name, description=definition.help, unit=unit, data=data)


def _point(one: ExportedValue, **times: int) -> NumberDataPoint | HistogramDataPoint:
    if isinstance(one.value, DistributionSummary):
        return HistogramDataPoint(
            attributes=one.labels,
            count=one.value.count,
            sum=one.value.total,
            bucket_counts=list(one.value.buckets),
            explicit_bounds=list(BUCKETS_S),
            min=None,  # not kept
            max=None,
            **times,
        )
    return NumberDataPoint(attributes=one.labels, value=float(one.value), **times)
