"""Metrics for OpenTelemetry: OTLP over HTTP in its JSON form, which every collector accepts. No package is needed."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.export.base import ExportedValue, Exporter, exported_values
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.rank_view import DistributionSummary
from torsh_distributed.observe.metrics.catalogue import BUCKETS_S, MetricKind

_TIMEOUT_S = 10.0
_CUMULATIVE = 2
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "watts": "W", "joules": "J"}


class OtlpMetrics(Exporter):
    """Posts to `endpoint`/v1/metrics every ten seconds: counters as sums, distributions as histograms."""

    interval_s = 10.0

    def __init__(self, endpoint: str) -> None:
        self._url = http_url(endpoint).rstrip("/")
        if not self._url.endswith("/v1/metrics"):
            self._url += "/v1/metrics"
        self._started_ns = time.time_ns()

    @override
    def export(self, view: JobView) -> None:
        post_json(self._url, otlp_request(view, started_ns=self._started_ns))


def post_json(url: str, record: Mapping[str, Any]) -> None:
    """Send a record to an address that `http_url` has checked; raises OSError unless it is taken."""
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        url, data=json.dumps(record).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
        answer.read(1 << 16)


def http_url(text: str) -> str:
    """`text` if it is an http or https address; anything else urllib would open as a file or another protocol."""
    if not text.startswith(("http://", "https://")):
        raise InvalidArgument(
            "the address must begin with http:// or https://", hint="such as http://localhost:4318", got=text
        )
    return text


def otlp_request(view: JobView, *, started_ns: int) -> dict[str, Any]:
    """An ExportMetricsServiceRequest as JSON."""
    now_ns = time.time_ns()
    by_name: dict[str, list[ExportedValue]] = {}
    for one in exported_values(view):
        by_name.setdefault(one.definition.name, []).append(one)
    metrics = [_metric(values, started_ns=started_ns, now_ns=now_ns) for values in by_name.values()]
    resource = {"service.name": "torsh", "torsh.run_id": view.header.run_id}
    scope = {"name": "torsh_distributed"}
    return {
        "resourceMetrics": [
            {
                "resource": {"attributes": otlp_attributes(resource)},
                "scopeMetrics": [{"scope": scope, "metrics": metrics}],
            }
        ]
    }


def _metric(values: list[ExportedValue], *, started_ns: int, now_ns: int) -> dict[str, Any]:
    definition = values[0].definition
    times = {"startTimeUnixNano": str(started_ns), "timeUnixNano": str(now_ns)}
    points: list[dict[str, Any]] = []
    for one in values:
        point: dict[str, Any] = {"attributes": otlp_attributes(one.labels), **times}
        if isinstance(one.value, DistributionSummary):
            point.update(
                count=str(one.value.count),
                sum=one.value.total,
                bucketCounts=[str(number) for number in one.value.buckets],
                explicitBounds=list(BUCKETS_S),
            )
        else:
            point["asDouble"] = one.value
        points.append(point)
    described = {
        "name": definition.name,
        "description": definition.help,
        "unit": _UNITS.get(definition.unit, definition.unit),
    }
    if definition.kind is MetricKind.DISTRIBUTION:
        return {**described, "histogram": {"dataPoints": points, "aggregationTemporality": _CUMULATIVE}}
    if definition.kind is MetricKind.COUNTER:
        total = {"dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}
        return {**described, "sum": total}
    return {**described, "gauge": {"dataPoints": points}}


def otlp_attributes(pairs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes as OTLP writes them; numbers stay numbers."""
    return [{"key": key, "value": _attribute_value(value)} for key, value in pairs.items()]


def _attribute_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
