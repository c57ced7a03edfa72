"""Metrics in files: one JSON object or one row of CSV per value set, appended, readable by this user alone."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from pathlib import Path
from typing import Any

from typing_extensions import override

from torsh_distributed.observe.export.base import Exporter, exported_values
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.rank_view import DistributionSummary
from torsh_distributed.private_files import open_private


class JsonlMetrics(Exporter):
    """Every few seconds one line for each value: time, name, labels, value; of a distribution, its statistics."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    @override
    def export(self, view: JobView) -> None:
        now = round(time.time(), 3)
        lines = []
        for one in exported_values(view):
            record: dict[str, Any] = {"time": now, "metric": one.definition.name, "labels": dict(one.labels)}
            record.update(_figures(one.value))
            lines.append(json.dumps(record))
        _append(self._path, "".join(f"{line}\n" for line in lines))


class CsvMetrics(Exporter):
    """The same as rows of time, metric, labels, value; of a distribution its mean."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    @override
    def export(self, view: JobView) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._path.exists():
            writer.writerow(["time", "metric", "labels", "value"])
        now = round(time.time(), 3)
        for one in exported_values(view):
            labels = ";".join(f"{name}={value}" for name, value in one.labels.items())
            figure = one.value.mean if isinstance(one.value, DistributionSummary) else one.value
            writer.writerow([now, one.definition.name, labels, figure])
        _append(self._path, text.getvalue())


def _figures(value: float | DistributionSummary) -> dict[str, Any]:
    if not isinstance(value, DistributionSummary):
        return {"value": value}
    names = ("count", "total", "last", "mean", "std", "low", "median", "p95", "p99", "high")
    return {name: getattr(value, name) for name in names}


def _append(path: Path, text: str) -> None:
    """One append, so a reader sees whole lines."""
    data = text.encode()
    fd = open_private(path, os.O_WRONLY | os.O_APPEND)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
