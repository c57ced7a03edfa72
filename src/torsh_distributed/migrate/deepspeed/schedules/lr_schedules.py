"""DeepSpeed's learning rate schedules by the `type` that a config gives."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
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

_KINDS = ("LR_RANGE_TEST", "ONE_CYCLE", "WARMUP_LR", "WARMUP_DECAY_LR", "WARMUP_COSINE_LR")
_RATES = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
"""The param that is a schedule's rate; of the others it is warmup_max_lr."""


def schedule_constants() -> dict[str, Any]:
    """The names of schedules and of their params, as constants in capitals, such as WARMUP_NUM_STEPS."""
    params = {
        name
        for kind in SCHEDULES.values()
        for name in inspect.signature(kind).parameters
        if name not in ("optimizer", "last_batch_iteration")
    }
    return {
        "LR_SCHEDULE": "lr_schedule",
        "VALID_LR_SCHEDULES": list(SCHEDULES),
        "WARMUP_LOG_RATE": "log",
        "WARMUP_LINEAR_RATE": "linear",
        **{name.upper(): name for name in sorted(params)},
        **dict(zip(_KINDS, SCHEDULES, strict=True)),
    }


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and the params of every schedule to a script's parser; what is not given is None."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training.")
    seen: set[str] = set()
    for kind in SCHEDULES.values():
        for name, one in inspect.signature(kind).parameters.items():
            if name in seen or name in ("optimizer", "last_batch_iteration"):
                continue
            seen.add(name)
            group.add_argument(f"--{name}", type=_kind_of(one.default), default=None, help=f"{name} of a schedule.")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The arguments of `add_tuning_arguments` on this process's command line, and those it does not know."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _kind_of(default: Any) -> Callable[[str], Any]:
    if isinstance(default, bool):
        return lambda text: text.lower() in ("1", "true", "yes")
    return type(default) if isinstance(default, int | str) else float


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The section `scheduler` that arguments of `add_tuning_arguments` say, or None and the reason."""
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None, "--lr_schedule not specified on command line"
    if kind not in SCHEDULES:
        return None, f"{kind} is not supported LR schedule"
    known = inspect.signature(SCHEDULES[kind]).parameters
    given = {name: getattr(args, name) for name in known if getattr(args, name, None) is not None}
    return {"type": kind, "params": given}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The rate of a section `scheduler`, or None and the reason."""
    kind, params = config.get("type"), config.get("params")
    if kind is None or params is None:
        return None, "LR schedule type or params not specified"
    if kind not in SCHEDULES:
        return None, f"{kind} is not a valid LR schedule"
    return params.get(_RATES.get(kind, "warmup_max_lr")), ""


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
