"""DeepSpeed's learning rate schedules by the `type` that a config gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.schedules.base import BatchSchedule
from torsh_distributed.migrate.deepspeed.schedules.one_cycle import OneCycle
from torsh_distributed.migrate.deepspeed.schedules.warmup_rates import (
    LRRangeTest,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from torsh_distributed.plan.problems import did_you_mean

SCHEDULES: dict[str, type[BatchSchedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}


def make_schedule(kind: str, params: Mapping[str, Any], optimizer: Any) -> BatchSchedule:
    """The schedule of a config's `scheduler` section: `type` and `params`.

    Raises ConfigurationError for a type or a param that DeepSpeed does not have, and for one that is missing.
    """
    if kind not in SCHEDULES:
        raise ConfigurationError(
            f"scheduler.type {kind!r} is not a schedule of DeepSpeed",
            hint=did_you_mean(kind, SCHEDULES) or f"it has: {', '.join(SCHEDULES)}",
        )
    known = inspect.signature(SCHEDULES[kind]).parameters
    for name in params:
        if name not in known:
            raise ConfigurationError(
                f"scheduler.params.{name} is not a param of {kind}",
                hint=did_you_mean(name, known) or f"it has: {', '.join(list(known)[1:])}",
            )
    missing = [
        name
        for name, one in known.items()
        if one.default is inspect.Parameter.empty and name != "optimizer" and name not in params
    ]
    if missing:
        raise ConfigurationError(
            f"scheduler.params lacks {', '.join(missing)}, which {kind} needs", hint="add it to scheduler.params"
        )
    return SCHEDULES[kind](optimizer, **params)
