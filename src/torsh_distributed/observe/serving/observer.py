"""Looks at a job: takes the messages of its ranks, serves the pages, exports, judges, and writes the report at the end.

Runs in a process beside the launcher, so neither a slow client nor a slow export nor a bug here can hold up training.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torsh_distributed import events
from torsh_distributed.errors import TorshError
from torsh_distributed.observe.alerts.alert_actions import AlertAction, LogAlert, make_action
from torsh_distributed.observe.alerts.alert_manager import Alert, AlertManager
from torsh_distributed.observe.alerts.alert_queue import AlertQueue
from torsh_distributed.observe.alerts.alert_rules import AlertRule, read_rules
from torsh_distributed.observe.anomalies import AnomalyWatch
from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.export.prometheus_text import job_registry, render
from torsh_distributed.observe.export.registry import make_exporter
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.page.html_report import write_report
from torsh_distributed.observe.page.page_routes import PageFeed, page_routes
from torsh_distributed.observe.serving.guarded_server import GuardedServer, PageAnswer, PageRequest, Route, needs_token
from torsh_distributed.observe.settings import ObserveSettings

_TICK_S = 1.0
Tell = Callable[[str, str], None]
"""(kind, text): `said` for people, `warned` for trouble."""


class Observer:
    """One job under observation. `start` opens what the settings ask for; trouble is told, never raised."""

    def __init__(self, settings: ObserveSettings, tell: Tell) -> None:
        self.view = JobView()
        self._settings = settings
        self._tell = tell
        self._stack = ExitStack()
        self._anomalies = AnomalyWatch(self.view)
        self._alerts = AlertManager(on_alert=self._take_alert, on_clear=self._take_cleared)
        self._queue: AlertQueue | None = None
        self.view.job_value_sources += [self._anomalies.values, self._alerts.values]
        self._feed = PageFeed(self.state)
        self._exporters: list[tuple[str, Exporter]] = []
        self._due_s: dict[int, float] = {}
        self._failing: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torsh-observer", daemon=True)

    def start(self) -> None:
        """Open the pages and the exports."""
        settings = self._settings
        if settings.prometheus_port is not None:
            self._try("the metrics page", self._open_metrics)
        if settings.page_port is not None:
            self._try("the dashboard", self._open_page)
        if settings.alert_rules is not None:
            self._try("the rules of alerts", self._open_alerts)
        for text in settings.exports:
            self._try(f"the export {text}", partial(self._add_exporter, text))
        self._thread.start()

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of a rank or of the launcher."""
        self.view.take(message)

    def state(self) -> dict[str, Any]:
        """What the page shows now."""
        return page_state(self.view, alerts=self._alerts.to_rows(), anomalies=self._anomalies.to_rows())

    def close(self) -> None:
        """The job has ended: the last exports, the report, then the pages close."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=15)
        for name, exporter in self._exporters:
            self._try(f"the export {name}", partial(exporter.close, self.view))
        if self._queue is not None:
            self._queue.close()
        if self._settings.report is not None:
            self._try("the report", self._write_report)
        spent = self.view.energy.summary()
        if spent is not None:
            self._tell("said", f"energy: {spent.in_words()}")
        self._feed.closing.set()
        self._stack.close()

    def _add_exporter(self, text: str) -> None:
        self._exporters.append((text, make_exporter(text)))

    # Pages

    def _open_metrics(self) -> None:
        assert self._settings.prometheus_port is not None, "asked for"
        registry = job_registry(self.view)

        def metrics(request: PageRequest) -> PageAnswer:
            body, content_type = render(registry, request.headers.get("Accept", ""))
            return PageAnswer(body, content_type)

        routes: dict[tuple[str, str], Route] = {("GET", "/metrics"): metrics}
        server = GuardedServer(self._settings.prometheus_host, self._settings.prometheus_port, routes)
        self._stack.callback(server.close)
        self._tell("said", f"metrics for Prometheus at {server.url}metrics")

    def _open_page(self) -> None:
        settings = self._settings
        assert settings.page_port is not None, "asked for"
        token = secrets.token_urlsafe(16) if needs_token(settings.page_host) else None
        routes = page_routes(self._feed, acknowledge=self._alerts.acknowledge)
        try:
            server = GuardedServer(settings.page_host, settings.page_port, routes, token=token)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            self._tell("warned", f"port {settings.page_port} is taken: the dashboard takes another")
            server = GuardedServer(settings.page_host, 0, routes, token=token)
        self._stack.callback(server.close)
        self._tell("said", f"dashboard at {server.url}")

    def _write_report(self) -> None:
        assert self._settings.report is not None, "asked for"
        path = write_report(self._settings.report, self.state())
        self._tell("said", f"report: {path}")

    # Alerts

    def _open_alerts(self) -> None:
        assert self._settings.alert_rules is not None, "asked for"
        rules, tables = read_rules(self._settings.alert_rules)
        password = os.environ.get("TORSH_SMTP_PASSWORD", "")
        ask = partial(self._tell, "change") if self._settings.can_change_plan else None
        actions: dict[str, AlertAction] = {
            name: make_action(name, table, smtp_password=password, ask_launcher=ask) for name, table in tables.items()
        }
        actions["log"] = LogAlert(partial(self._tell, "warned"))
        self._queue = AlertQueue(
            actions, run_id=lambda: self.view.header.run_id, tell=lambda text: self._tell("warned", text)
        )
        for rule in rules:
            self._alerts.add_rule(rule)

    def _take_alert(self, rule: AlertRule, alert: Alert) -> None:
        if self._queue is not None:
            self._queue.put(rule, alert)
        event = events.AlertEvent(severity=alert.severity.value, name=alert.name, message=alert.message)
        events.emit(event)
        with self.view.lock:  # it stays among what happened when it has ended
            self.view.incidents.append(events.to_record(event))

    def _take_cleared(self, rule: AlertRule, alert: Alert) -> None:
        if self._queue is not None:
            self._queue.put(rule, alert)

    # Every second

    def _run(self) -> None:
        while not self._closing.wait(_TICK_S):
            now_s = time.monotonic()
            self._try("looking for anomalies", self._anomalies.tick)
            self._try("checking the rules of alerts", partial(self._alerts.check, self.view))
            for number, (name, exporter) in enumerate(self._exporters):
                if now_s >= self._due_s.get(number, 0.0):
                    self._due_s[number] = now_s + exporter.interval_s
                    self._try(f"the export {name}", partial(exporter.export, self.view))

    def _try(self, what: str, action: Callable[[], object]) -> None:
        """Do it; a failure is told once, until it works again."""
        try:
            action()
        except Exception as error:
            if what not in self._failing:
                self._failing.add(what)
                told = error.message if isinstance(error, TorshError) else str(error) or type(error).__name__
                self._tell("warned", f"{what} does not work: {told}; training goes on")
        else:
            self._failing.discard(what)
