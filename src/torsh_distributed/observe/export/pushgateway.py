"""Pushes the job to a Prometheus Pushgateway, for jobs that end before they are scraped."""

from __future__ import annotations

from typing_extensions import override

from torsh_distributed.observe.export.base import Exporter, http_url
from torsh_distributed.observe.export.prometheus_text import job_registry
from torsh_distributed.observe.job.job_view import JobView

_TIMEOUT_S = 10.0


class Pushgateway(Exporter):
    """Replaces the group (job, run) at the gateway every ten seconds; a job that succeeded removes it at its end."""

    interval_s = 10.0

    def __init__(self, url: str) -> None:
        self._url = http_url(url)

    @override
    def export(self, view: JobView) -> None:
        from prometheus_client import push_to_gateway

        push_to_gateway(
            self._url, job="torsh", registry=job_registry(view), grouping_key=self._group(view), timeout=_TIMEOUT_S
        )

    @override
    def close(self, view: JobView) -> None:
        """A failed job leaves its last values, for whoever looks why."""
        from prometheus_client import delete_from_gateway

        if view.header.exit_code == 0:
            delete_from_gateway(self._url, job="torsh", grouping_key=self._group(view), timeout=_TIMEOUT_S)
        else:
            self.export(view)

    def _group(self, view: JobView) -> dict[str, str]:
        return {"run": view.header.run_id or "none"}
