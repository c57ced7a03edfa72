"""Evaluates rules over a job: which series meet their condition, for how long, and what was already told."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torsh_distributed.observe.alerts.alert_rules import OPERATORS, AlertRule, AlertSeverity, ConditionKind
from torsh_distributed.observe.anomalies import robust_spread
from torsh_distributed.observe.export.base import ExportedValue, exported_values
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.rank_view import DistributionSummary, ValueKey

MAX_HISTORY = 1000
_MAX_SERIES = 20_000
_BASELINE = 60
_LEAST_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that fired, for one or more series."""

    id: str
    name: str
    severity: AlertSeverity
    message: str
    time: float
    series: tuple[str, ...]
    """Whom it is about, such as `rank 3`; empty for the whole job."""
    is_acknowledged: bool = False
    resolved: float | None = None


class _SeriesState:
    """What is remembered of one series of one rule."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque(maxlen=512)
        self.baseline: deque[float] = deque(maxlen=_BASELINE)
        self.met_since: float | None = None
        self.fired_at: float | None = None
        self.last_seen = -math.inf


class AlertManager:
    """Rules, what fires, and what has fired; thread-safe.

    `check` is called about once a second; `on_alert` is told of each alert, `on_clear` of each that has ended.
    """

    def __init__(
        self,
        rules: Iterable[AlertRule] = (),
        *,
        on_alert: Callable[[AlertRule, Alert], None] | None = None,
        on_clear: Callable[[AlertRule, Alert], None] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._rules: dict[str, AlertRule] = {rule.name: rule for rule in rules}
        self._on_alert = on_alert
        self._on_clear = on_clear
        self._series: dict[tuple[str, str], _SeriesState] = {}
        self._firing: dict[str, Alert] = {}
        self._history: deque[Alert] = deque(maxlen=MAX_HISTORY)
        self._numbers = itertools.count(1)
        self._started = time.time()

    def add_rule(self, rule: AlertRule) -> None:
        """Add a rule, or replace the one of that name."""
        self._rules[rule.name] = rule

    def remove_rule(self, name: str) -> bool:
        """Remove a rule; whether it was there. What it fired stays in the history."""
        self._firing.pop(name, None)
        return self._rules.pop(name, None) is not None

    @property
    def rules(self) -> list[AlertRule]:
        """All rules."""
        return list(self._rules.values())

    @property
    def firing(self) -> list[Alert]:
        """What holds now."""
        return list(self._firing.values())

    @property
    def history(self) -> list[Alert]:
        """What has fired, oldest first, at most a thousand."""
        return list(self._history)

    @property
    def unacknowledged(self) -> list[Alert]:
        """What holds now and nobody has acknowledged."""
        return [alert for alert in self._firing.values() if not alert.is_acknowledged]

    def acknowledge(self, alert_id: str) -> bool:
        """Somebody cares for it: it is not told again until it has ended and comes back. Whether it was known."""
        with self._lock:
            for name, alert in self._firing.items():
                if alert.id == alert_id:
                    self._firing[name] = replace(alert, is_acknowledged=True)
                    self._replace_in_history(self._firing[name])
                    return True
        return False

    def statistics(self) -> dict[str, dict[str, int]]:
        """How often alerts fired, by severity and by rule."""
        return {
            "severity": dict(Counter(alert.severity.value for alert in self._history)),
            "rule": dict(Counter(alert.name for alert in self._history)),
        }

    def clear(self) -> None:
        """Forget the history; what fires still fires."""
        self._history.clear()

    def to_rows(self) -> list[dict[str, Any]]:
        """What holds now, JSON-ready."""
        with self._lock:
            return [asdict(alert) for alert in self._firing.values()]

    def values(self) -> dict[ValueKey, float]:
        """What holds now, as metrics of the job."""
        with self._lock:
            return {("torsh_alert_firing", (alert.name, alert.severity.value)): 1.0 for alert in self._firing.values()}

    # Checking

    def check(self, view: JobView, *, now: float | None = None) -> list[Alert]:
        """Evaluate every rule; returns the alerts that fire now for the first time, or again after their cooldown."""
        now = time.time() if now is None else now
        values: dict[str, list[ExportedValue]] = {}
        if not self._rules:
            return []
        for one in exported_values(view, {rule.metric for rule in self.rules}):
            values.setdefault(one.definition.name, []).append(one)
        with self._lock:
            found = [self._check_rule(rule, view, _matching(rule, values), now) for rule in self.rules]
        return [alert for alert in found if alert is not None]

    def _check_rule(self, rule: AlertRule, view: JobView, values: list[ExportedValue], now: float) -> Alert | None:
        due: list[tuple[str, str]] = []
        still: list[str] = []
        for series, problem in self._problems(rule, view, values, now):
            state = self._state(rule, series)
            if problem is None:
                state.met_since = None
                continue
            if state.met_since is None:
                state.met_since = now
            if now - state.met_since >= rule.for_s:
                still.append(series)
                if state.fired_at is None or now - state.fired_at >= rule.cooldown_s:
                    due.append((series, problem))
        if not still:
            ended = self._firing.pop(rule.name, None)
            if ended is not None:
                ended = replace(ended, resolved=now)
                self._replace_in_history(ended)
                if self._on_clear is not None:
                    self._on_clear(rule, ended)
            return None
        current = self._firing.get(rule.name)
        if current is not None and (not due or current.is_acknowledged):
            return None
        if not due:
            # It holds again before the cooldown is over: it fires, but nobody is told again.
            self._firing[rule.name] = self._alert(rule, still, "", now)
            return None
        for series, _ in due:
            self._state(rule, series).fired_at = now
        return self._fire(rule, due, now)

    def _fire(self, rule: AlertRule, due: list[tuple[str, str]], now: float) -> Alert:
        alert = self._alert(rule, [series for series, _ in due], due[0][1], now)
        self._firing[rule.name] = alert
        self._history.append(alert)
        if self._on_alert is not None:
            self._on_alert(rule, alert)
        return alert

    def _alert(self, rule: AlertRule, series: Iterable[str], problem: str, now: float) -> Alert:
        named = sorted({one for one in series if one}, key=_natural)
        about = f"{', '.join(named[:8])}{f' and {len(named) - 8} more' if len(named) > 8 else ''}"
        message = "; ".join(filter(None, [rule.description, about, problem]))
        return Alert(f"{rule.name}-{next(self._numbers)}", rule.name, rule.severity, message, now, tuple(named))

    def _replace_in_history(self, alert: Alert) -> None:
        for index, known in enumerate(self._history):
            if known.id == alert.id:
                self._history[index] = alert

    def _state(self, rule: AlertRule, series: str) -> _SeriesState:
        key = (rule.name, series)
        if key not in self._series:
            if len(self._series) >= _MAX_SERIES:
                self._series.pop(next(iter(self._series)))
            self._series[key] = _SeriesState()
        return self._series[key]

    def _problems(
        self, rule: AlertRule, view: JobView, values: list[ExportedValue], now: float
    ) -> Iterable[tuple[str, str | None]]:
        """Every series of a rule, and what is wrong with it, or None. A series without a value is not judged."""
        if rule.condition is ConditionKind.CUSTOM:
            assert rule.check is not None, "checked with the rule"
            yield "", rule.check(view)
            return
        if rule.condition is ConditionKind.ABSENCE:
            yield "", self._absence(rule, values, now)
            return
        for one in values:
            number = one.value.last if isinstance(one.value, DistributionSummary) else one.value
            series = " ".join(f"{name} {value}" for name, value in one.labels.items())
            state = self._state(rule, series)
            state.samples.append((now, number))
            if rule.condition is ConditionKind.THRESHOLD:
                is_met = OPERATORS[rule.operator](number, rule.value)
                yield series, f"{rule.metric} is {number:.6g}, {rule.operator} {rule.value:g}" if is_met else None
            elif rule.condition is ConditionKind.RATE:
                yield series, self._rate(rule, state, now)
            else:
                yield series, self._anomaly(rule, state, number)

    def _absence(self, rule: AlertRule, values: list[ExportedValue], now: float) -> str | None:
        state = self._state(rule, "")
        if values:
            state.last_seen = now
            return None
        silent_s = now - max(state.last_seen, self._started)
        return f"{rule.metric} has had no value for {silent_s:.0f} s" if silent_s >= rule.window_s else None

    def _rate(self, rule: AlertRule, state: _SeriesState, now: float) -> str | None:
        """The slope of a straight line through the window, as `deriv` of Prometheus has it."""
        window = [(at - now, value) for at, value in state.samples if now - at <= rule.window_s]
        if len(window) < 2 or window[-1][0] == window[0][0]:
            return None
        mean_at = math.fsum(at for at, _ in window) / len(window)
        mean_value = math.fsum(value for _, value in window) / len(window)
        over = math.fsum((at - mean_at) ** 2 for at, _ in window)
        slope = math.fsum((at - mean_at) * (value - mean_value) for at, value in window) / over
        if not OPERATORS[rule.operator](slope, rule.value):
            return None
        return f"{rule.metric} changes by {slope:.4g} a second, {rule.operator} {rule.value:g}"

    def _anomaly(self, rule: AlertRule, state: _SeriesState, number: float) -> str | None:
        if len(state.baseline) < _LEAST_SAMPLES:
            state.baseline.append(number)
            return None
        middle, scatter = robust_spread(state.baseline)
        z = abs(number - middle) / max(scatter, abs(middle) * 0.01, 1e-12)
        state.baseline.append(number)
        limit = rule.value or 6.0
        return f"{rule.metric} is {number:.6g}, usually {middle:.6g}" if z > limit else None


def _matching(rule: AlertRule, values: Mapping[str, list[ExportedValue]]) -> list[ExportedValue]:
    """The series of a rule's metric that have its labels."""
    found = values.get(rule.metric, [])
    return [one for one in found if rule.labels.items() <= one.labels.items()] if rule.labels else found


def _natural(text: str) -> tuple[str, int]:
    """`rank 10` after `rank 9`."""
    head, _, tail = text.rpartition(" ")
    return (head, int(tail)) if tail.isdigit() else (text, 0)
