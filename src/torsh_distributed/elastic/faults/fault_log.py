"""What a run made of its faults: from the log that all ranks write, how long after each the next step was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.elastic.faults.fault import Fault
from torsh_distributed.events.recorded import is_time, record_in


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """One fault that happened, and how training went on."""

    fault: Fault
    time: float
    step: int
    """Updates done when it happened."""
    next_step_s: float | None
    """Seconds until a step was done again, by any rank: one that goes on, or one that was started since."""
    caught_up_s: float | None
    """Seconds until the step it happened in was done; more than the former where steps had to be repeated."""
    replaced_s: float | None
    """Seconds until a process that was started since had done a step."""


def read_fault_log(path: Path) -> list[dict[str, Any]]:
    """The records, in the order of time. A line that a dying process did not finish is left out."""
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        record = record_in(line)
        if isinstance(record, dict) and _is_sound(record):
            records.append(record)
    return sorted(records, key=lambda one: float(one["time"]))


def _is_sound(record: dict[str, Any]) -> bool:
    numbers = [record.get(name) for name in ("step", "pid")]
    is_counted = all(isinstance(one, int) and abs(one) < 2**63 for one in numbers)
    if not is_counted or not is_time(record.get("time")):
        return False
    return record.get("kind") == "step" or (record.get("kind") == "fault" and isinstance(record.get("fault"), str))


def fault_outcomes(records: Sequence[dict[str, Any]]) -> list[FaultOutcome]:
    """Every fault of the log. That a rank reaches a step means that the one before it is done."""
    steps = [one for one in records if one["kind"] == "step"]
    first_step: dict[int, tuple[float, int]] = {}
    for one in steps:
        first_step.setdefault(one["pid"], (one["time"], one["step"]))
    found = []
    for one in records:
        if one["kind"] != "fault":
            continue
        at, step = float(one["time"]), int(one["step"])
        after = [other for other in steps if other["time"] > at]
        caught_up = [other["time"] for other in after if other["step"] > step]
        replaced = [
            other["time"]
            for other in after
            if first_step[other["pid"]][0] > at and other["step"] > first_step[other["pid"]][1]
        ]
        went_on = [*caught_up, *replaced]
        found.append(
            FaultOutcome(
                fault=Fault.parse(one["fault"]),
                time=at,
                step=step,
                next_step_s=min(went_on) - at if went_on else None,
                caught_up_s=min(caught_up) - at if caught_up else None,
                replaced_s=min(replaced) - at if replaced else None,
            )
        )
    return found
