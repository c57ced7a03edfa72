"""What a check has found: what it is, why it matters, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class CheckSeverity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Works; could be better."""
    WARNING = "warning"
    """Works here and now, and is known to break larger or longer runs."""
    ERROR = "error"
    """A run will fail."""


@dataclass(frozen=True, kw_only=True)
class DiagnosticResult:
    """The outcome of one check."""

    check_name: str
    severity: CheckSeverity = CheckSeverity.OK
    description: str
    """What was found."""
    reason: str = ""
    """Why it matters; empty if nothing is wrong."""
    remediation: str = ""
    """What to do; empty if nothing is wrong."""
    data: dict[str, Any] = field(default_factory=dict)
    """The numbers behind it."""

    @property
    def passed(self) -> bool:
        """Whether a run is not in danger."""
        return self.severity in (CheckSeverity.OK, CheckSeverity.NOTE)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "severity": self.severity.value, "passed": self.passed}


def worst(results: Iterable[DiagnosticResult]) -> CheckSeverity:
    """The most serious of several."""
    order = list(CheckSeverity)
    return max((result.severity for result in results), key=order.index, default=CheckSeverity.OK)
