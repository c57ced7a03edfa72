"""A Grafana dashboard made from the catalogue of metrics: a row for each topic, a panel for each metric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torsh_distributed.observe.metrics.catalogue import CATALOGUE, MetricDefinition, MetricKind, MetricScope

_UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "celsius": "celsius",
    "watts": "watt",
    "joules": "joule",
}
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


def grafana_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it; the data source is chosen at import."""
    panels: list[dict[str, Any]] = []
    top = 0
    topics = dict.fromkeys(definition.topic for definition in CATALOGUE.values())
    for topic in topics:
        shown = [one for one in CATALOGUE.values() if one.topic == topic and not _is_clock(one)]
        panels.append(_row(topic, len(panels) + 1, top))
        top += 1
        for index, definition in enumerate(shown):
            place = {"x": index % _PER_ROW * _WIDTH, "y": top + index // _PER_ROW * _HEIGHT}
            panels.append(_panel(definition, len(panels) + 1, {**place, "w": _WIDTH, "h": _HEIGHT}))
        top += (len(shown) + _PER_ROW - 1) // _PER_ROW * _HEIGHT
    return {
        "title": "torsh-distributed",
        "uid": "torsh-distributed",
        "tags": ["torsh", "pytorch"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "rank",
                    "type": "query",
                    "label": "Rank",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(torsh_step, rank)",
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                },
            ]
        },
        "panels": panels,
    }


def queries(definition: MetricDefinition) -> Iterator[tuple[str, str]]:
    """What a panel asks Prometheus: (expression, legend)."""
    name = definition.name
    place = {MetricScope.RANK: "rank", MetricScope.NODE: "node"}.get(definition.scope)
    chosen = '{rank=~"$rank"}' if definition.scope is MetricScope.RANK else ""
    by = [*([place] if place else []), *definition.labels]
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    if definition.kind is MetricKind.COUNTER:
        yield f"rate({name}_total{chosen}[1m])", legend
    elif definition.kind is MetricKind.GAUGE:
        yield f"{name}{chosen}", legend
    else:
        grouped = ", ".join(["le", *by])
        for percent in (0.5, 0.95):
            expression = f"histogram_quantile({percent}, sum by ({grouped}) (rate({name}_bucket{chosen}[1m])))"
            yield expression, f"p{percent * 100:.0f} {legend}".strip()


def _is_clock(definition: MetricDefinition) -> bool:
    return definition.name.endswith("_timestamp_seconds")


def _row(topic: str, number: int, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": _WIDTH * _PER_ROW, "h": 1}
    return {"id": number, "type": "row", "title": topic, "gridPos": place, "collapsed": False, "panels": []}


def _panel(definition: MetricDefinition, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    is_rate = definition.kind is MetricKind.COUNTER
    unit = _UNITS.get(definition.unit, "short")
    if is_rate and definition.unit:
        unit = {"bytes": "Bps", "joules": "watt", "seconds": "percentunit"}.get(definition.unit, "short")
    return {
        "id": number,
        "type": "timeseries",
        "title": definition.name.removeprefix("torsh_").replace("_", " ") + (" per second" if is_rate else ""),
        "description": definition.help,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": source}
            for index, (expression, legend) in enumerate(queries(definition))
        ],
    }
