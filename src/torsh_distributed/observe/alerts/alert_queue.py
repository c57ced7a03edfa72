"""Runs actions on a thread of their own, tries again what fails, and drops what it cannot keep up with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.errors import OperationTimeout
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
        self._room = threading.Semaphore(MAX_WAITING)
        self._closing = threading.Event()
        self._failing: set[str] = set()
        self.num_dropped = 0
        self._thread = SerialThread("torsh-alerts")

    def put(self, rule: AlertRule, alert: Alert) -> None:
        """Take an alert, or one that has ended, for every action of its rule; never waits."""
        for name in rule.actions:
            if not self._closing.is_set() and self._room.acquire(blocking=False):
                self._thread.submit(self._run, name, alert)
            else:
                self.num_dropped += 1

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Run what waits, without trying again, and stop."""
        self._closing.set()
        try:
            self._thread.close(timeout_s)
        except OperationTimeout as error:
            self._tell(f"alerts are not delivered: {error.message}")

    def _run(self, name: str, alert: Alert) -> None:
        self._room.release()  # it no longer waits
        self._act(name, alert)

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
