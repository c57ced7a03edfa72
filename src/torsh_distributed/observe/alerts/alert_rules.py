"""Rules: when a metric of a job needs attention from a person. From Python or from a TOML file."""

from __future__ import annotations

import json
import operator
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.observe.metrics.catalogue import CATALOGUE, CUSTOM_PREFIX, MetricKind

if TYPE_CHECKING:
    from torsh_distributed.observe.job.job_view import JobView


OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


class AlertSeverity(StrEnum):
    """How urgent an alert is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"
    EMERGENCY = "emergency"


class ConditionKind(StrEnum):
    """What a rule looks at."""

    THRESHOLD = "threshold"
    """The newest value against `value`."""
    RATE = "rate"
    """The change per second over `window_s`, against `value`."""
    ANOMALY = "anomaly"
    """The newest value against those before it: `value` robust deviations away."""
    ABSENCE = "absence"
    """No rank has told a value, or none for `window_s`."""
    CUSTOM = "custom"
    """A function of the job; from Python only."""


Check = Callable[["JobView"], "str | None"]
"""Looks at a job and says what is wrong with it, or None."""


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """One rule. It fires when its condition has held for `for_s`, for each rank on its own."""

    name: str
    condition: ConditionKind = ConditionKind.THRESHOLD
    metric: str = ""
    """A metric of the catalogue, or `torsh_custom_…`; distributions are judged by their newest value."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Only series with these labels, such as `op`; all of the metric's without."""
    operator: str = ">"
    value: float = 0.0
    window_s: float = 60.0
    """Of a rate, the time it is measured over; of an absence, the silence that is allowed."""
    for_s: float = 0.0
    """How long the condition must hold."""
    severity: AlertSeverity = AlertSeverity.WARNING
    cooldown_s: float = 300.0
    """After it fired, how long the same rank does not fire again."""
    description: str = ""
    actions: tuple[str, ...] = ("log",)
    """Names of actions; `log` is always there."""
    check: Check | None = field(default=None, compare=False)
    """The function of a custom rule."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 100:
            raise ConfigurationError("a rule needs a name of at most 100 characters", got=self.name[:100])
        if self.condition is ConditionKind.CUSTOM:
            if self.check is None:
                raise ConfigurationError("a custom rule needs a function `check`", rule=self.name)
            return
        if self.metric not in CATALOGUE and not self.metric.startswith(CUSTOM_PREFIX):
            raise ConfigurationError(
                f"there is no metric {self.metric!r}",
                hint=f"`torsh metrics` lists them; yours begin with {CUSTOM_PREFIX}",
                rule=self.name,
            )
        known = CATALOGUE[self.metric].labels if self.metric in CATALOGUE else ()
        unknown = set(self.labels) - {*known, "rank", "node"}
        if unknown:
            raise ConfigurationError(
                f"{self.metric} has no label {', '.join(sorted(unknown))}",
                hint=f"labels: {', '.join((*known, 'rank', 'node'))}",
                rule=self.name,
            )
        if self.operator not in OPERATORS:
            raise ConfigurationError(f"an operator is one of {', '.join(OPERATORS)}", rule=self.name, got=self.operator)
        for name in ("window_s", "for_s", "cooldown_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name} must be a number of seconds", rule=self.name)
        if self.window_s == 0 and self.condition in (ConditionKind.RATE, ConditionKind.ABSENCE):
            raise ConfigurationError("window_s must be above 0", rule=self.name)


_RULE_KEYS = {"name", "condition", "metric", "operator", "value", "window_s", "for_s", "severity", "cooldown_s"}
_RULE_KEYS |= {"description", "actions", "labels"}
DEFAULT = "default"
"""In place of a file: the rules that come with the library."""
_DEFAULT_FILE = Path(__file__).parent / "default_rules.toml"


def read_rules(path: str | Path) -> tuple[list[AlertRule], dict[str, dict[str, Any]]]:
    """The rules of a TOML file, and its actions by name; raises ConfigurationError for what is not understood.

    `default` stands for the rules that come with the library.
    """
    path = _DEFAULT_FILE if str(path) == DEFAULT else path
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError("the rules cannot be read", file=str(path), reason=str(error)) from error
    unknown = set(content) - {"rule", "action"}
    if unknown:
        raise ConfigurationError(
            f"a file of rules has tables [[rule]] and [action.NAME], not {', '.join(sorted(unknown))}", file=str(path)
        )
    actions = content.get("action", {})
    if not isinstance(actions, dict) or not all(isinstance(one, dict) for one in actions.values()):
        raise ConfigurationError("an action is a table [action.NAME]", file=str(path))
    if not isinstance(content.get("rule", []), list):
        raise ConfigurationError("a rule is a table [[rule]]", file=str(path))
    rules = [_rule_of(table, str(path)) for table in content.get("rule", [])]
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise ConfigurationError("two rules have the same name", file=str(path), names=names)
    for rule in rules:
        missing = set(rule.actions) - {"log"} - set(actions)
        if missing:
            raise ConfigurationError(
                f"the rule {rule.name!r} names an action that the file does not have: {', '.join(sorted(missing))}",
                hint="define it as [action.NAME], or use log",
                file=str(path),
            )
    return rules, actions


def _rule_of(table: Any, path: str) -> AlertRule:
    if not isinstance(table, dict):
        raise ConfigurationError("a rule is a table [[rule]]", file=path)
    unknown = set(table) - _RULE_KEYS
    if unknown:
        raise ConfigurationError(
            f"a rule has no key {', '.join(sorted(unknown))}", hint=f"keys: {', '.join(sorted(_RULE_KEYS))}", file=path
        )
    values: dict[str, Any] = dict(table)
    try:
        values["condition"] = ConditionKind(values.get("condition", "threshold"))
        values["severity"] = AlertSeverity(values.get("severity", "warning"))
    except ValueError as error:
        raise ConfigurationError(f"{error}", rule=str(table.get("name")), file=path) from None
    for name in ("value", "window_s", "for_s", "cooldown_s"):
        if name in values:
            if isinstance(values[name], bool) or not isinstance(values[name], int | float):
                raise ConfigurationError(f"{name} must be a number", rule=str(table.get("name")), file=path)
            if abs(values[name]) > 1e300:
                raise ConfigurationError(f"{name} is too large", rule=str(table.get("name")), file=path)
            values[name] = float(values[name])
    for name in ("name", "metric", "operator", "description"):
        if not isinstance(values.get(name, ""), str):
            raise ConfigurationError(f"{name} must be a text", file=path)
    labels = values.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(one, str) for one in labels.values()):
        raise ConfigurationError("labels is a table of texts", rule=str(table.get("name")), file=path)
    chosen = values.get("actions", ["log"])
    if not isinstance(chosen, list) or not all(isinstance(one, str) for one in chosen):
        raise ConfigurationError("actions is a list of names", rule=str(table.get("name")), file=path)
    values["actions"] = tuple(chosen)
    values.setdefault("name", "")
    return AlertRule(**values)


def prometheus_rules(rules: Iterable[AlertRule]) -> str:
    """YAML for `rule_files` of Prometheus. Raises FeatureNotAvailable for a rule that Prometheus cannot evaluate."""
    import yaml

    group = {"name": "torsh", "rules": [_rule(rule) for rule in rules]}
    return str(yaml.safe_dump({"groups": [group]}, sort_keys=False, width=120))


def _rule(rule: AlertRule) -> dict[str, Any]:
    made: dict[str, Any] = {"alert": rule.name, "expr": expression(rule)}
    if rule.for_s:
        made["for"] = _duration(rule.for_s)
    made["labels"] = {"severity": rule.severity.value}
    made["annotations"] = {"summary": rule.description or f"{rule.metric} {rule.operator} {rule.value:g}"}
    return made


def expression(rule: AlertRule) -> str:
    """The condition in PromQL."""
    series = _series(rule.metric) + _matchers(rule.labels)
    window = _duration(rule.window_s)
    match rule.condition:
        case ConditionKind.THRESHOLD:
            return f"{series} {rule.operator} {rule.value:g}"
        case ConditionKind.RATE:
            return f"deriv({series}[{window}]) {rule.operator} {rule.value:g}"
        case ConditionKind.ABSENCE:
            return f"absent_over_time({series}[{window}])"
        case _:
            raise FeatureNotAvailable(
                f"Prometheus cannot evaluate the rule {rule.name!r}: its condition is {rule.condition.value}",
                hint="leave it out of the exported rules; the job's own observer evaluates it",
                feature="alert rules",
            )


def _series(metric: str) -> str:
    definition = CATALOGUE.get(metric)
    if definition is not None and definition.kind is MetricKind.COUNTER:
        return f"{metric}_total"
    if definition is not None and definition.kind is MetricKind.DISTRIBUTION:
        raise FeatureNotAvailable(
            f"{metric} is a histogram for Prometheus, which has no newest value",
            hint="write the rule over a gauge, such as torsh_wait_ratio",
            feature="alert rules",
        )
    return metric


def _matchers(labels: Mapping[str, str]) -> str:
    pairs = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in labels.items()]
    return f"{{{', '.join(pairs)}}}" if pairs else ""


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms" if seconds % 1 else f"{int(seconds)}s"
