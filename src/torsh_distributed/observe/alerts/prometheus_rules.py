"""The same rules for Prometheus: a file of alerting rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.observe.alerts.alert_rules import AlertRule, ConditionKind
from torsh_distributed.observe.metrics.catalogue import CATALOGUE, MetricKind


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
    series = _series(rule.metric)
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


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms" if seconds % 1 else f"{int(seconds)}s"
