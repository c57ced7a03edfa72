"""The report of a run that is going on, kept in a file: the export `energy:FILE`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.report.report_page import report_page
from torsh_distributed.green.report.run_report import run_report
from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.job.job_view import JobView

_FORMS = (".json", ".html")


class EnergyReportFile(Exporter):
    """Replaces the file every five minutes and at the end: whoever reads it sees the old or the new one, whole."""

    interval_s = 300.0

    def __init__(self, target: str) -> None:
        """Raises InvalidArgument for a file that is neither JSON nor HTML."""
        self._path = Path(target)
        if self._path.suffix not in _FORMS:
            raise InvalidArgument(
                "a report of energy is a .json or .html file", hint="such as energy:energy.json", got=target
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)

    @override
    def export(self, view: JobView) -> None:
        with view.lock:
            if not view.energy.has_energy:  # the meters have not been read yet
                return
            found = run_report(view)
        text = report_page(found) if self._path.suffix == ".html" else json.dumps(found.to_dict(), indent=2) + "\n"
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path)

    @override
    def close(self, view: JobView) -> None:
        if not view.energy.has_energy:
            raise InvalidArgument("no meter was read", hint="run with --green, or set green.enabled")
        self.export(view)
