"""Runs actions on a thread of their own, tries again what fails, and drops what it cannot keep up with."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from torsh_distributed.observe.alerts.alert_actions import AlertAction
from torsh_distributed.observe.alerts.alert_manager import Alert
from torsh_distributed.observe.alerts.alert_rules import AlertRule

MAX_WAITING = 100
_MAX_TRIES = 3


class AlertQueue:
    """Actions by name. An alert that finds the queue full is dropped and counted; so is one that failed three times."""

    def __init__(
        self,
        actions: Mapping[str, AlertAction],
        *,
        run_id: Callable[[], str],
        tell: Callable[[str], None],
        retry_s: float = 2.0,
    ) -> None:
        self._actions = actions
        self._run_id = run_id
        self._tell = tell
        self._retry_s = retry_s
        self._waiting: queue.Queue[tuple[str, Alert] | None] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._failing: set[str] = set()
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="torsh-alerts", daemon=True)
        self._thread.start()

    def put(self, rule: AlertRule, alert: Alert) -> None:
        """Take an alert, or one that has ended, for every action of its rule; never waits."""
        for name in rule.actions:
            try:
                self._waiting.put_nowait((name, alert))
            except queue.Full:
                self.num_dropped += 1

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Run what waits, without trying again, and stop."""
        self._closing.set()
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            self.num_dropped += 1
        self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._act(*entry)

    def _act(self, name: str, alert: Alert) -> None:
        for number in range(_MAX_TRIES):
            try:
                action = self._actions[name]
                (action.run if alert.resolved is None else action.clear)(alert, self._run_id())
            except Exception as error:
                is_last = number == _MAX_TRIES - 1 or self._closing.wait(self._retry_s * 2**number)
                if is_last:
                    self.num_dropped += 1
                    if name not in self._failing:
                        self._failing.add(name)
                        self._tell(f"the action {name} of an alert does not work: {error}")
                    return
            else:
                self._failing.discard(name)
                return
