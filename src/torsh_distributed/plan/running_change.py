"""What of a plan may change while its job runs: between two updates, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from typing_extensions import override

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.describing import show
from torsh_distributed.plan.plan import Plan

CHANGEABLE: Mapping[str, str] = {
    "training.gradient_clipping": "from the next update on",
    "training.gradient_accumulation": "the batch stays the same, in more or fewer passes",
    "compress.method": "data parallelism only; what the old method left out of earlier gradients is lost",
    "compress.warmup_steps": "counted from the change on",
    "compress.period": "from the change on",
    "compress.error_feedback": "starts empty",
    "ddp.max_bucket_size_mb": "buckets are built again; replicas and ZeRO-1 without compression",
    "ddp.min_bucket_size_mb": "as above",
    "fsdp.forward_prefetch": "from the next forward on",
    "fsdp.max_gathered_ahead": "from the next forward on",
    "checkpoint.every_steps": "where checkpoints are enabled",
    "checkpoint.every_s": "where checkpoints are enabled",
}
"""The keys that a running Engine can take, and what that means. All others decide how the job was built."""

_OTHER_WAYS = {"training.learning_rate": "learning_rate_factor = 0.5 halves the rates of all parameter groups"}


@dataclass(frozen=True, kw_only=True)
class RunningChange:
    """A change of the plan of a running job."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """New values by full key, such as `training.gradient_clipping`."""
    learning_rate_factor: float = 1.0
    """What every learning rate is multiplied with, the scheduler's too."""
    save_checkpoint: bool = False
    """Save a checkpoint at the change."""
    hold_s: float = 0.0
    """Stop before that update, saving if the job keeps checkpoints, until the launcher says to go on, or that long."""

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """The change in `set`, `learning_rate_factor`, `save_checkpoint`, `hold_s`; otherwise ConfigurationError.

        `set` has sections and keys as a plan has them. Keys that cannot change while a job runs are refused by name.
        """
        unknown = set(table) - {"set", "learning_rate_factor", "save_checkpoint", "hold_s"}
        if unknown:
            raise ConfigurationError(
                f"a change of the plan has no key {', '.join(sorted(unknown))}",
                hint="keys: set, learning_rate_factor, save_checkpoint, hold_s",
            )
        factor, save = table.get("learning_rate_factor", 1.0), table.get("save_checkpoint", False)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
            raise ConfigurationError("learning_rate_factor must be a number above 0", got=repr(factor)[:100])
        if not isinstance(save, bool):
            raise ConfigurationError("save_checkpoint must be true or false", got=repr(save)[:100])
        hold_s = table.get("hold_s", 0.0)
        if isinstance(hold_s, bool) or not isinstance(hold_s, int | float) or not 0 <= hold_s < float("inf"):
            raise ConfigurationError("hold_s must be a number of seconds", got=repr(hold_s)[:100])
        values = _values(table.get("set", {}))
        change = cls(values=values, learning_rate_factor=float(factor), save_checkpoint=save, hold_s=float(hold_s))
        if change == cls():
            raise ConfigurationError(
                "a change of the plan that changes nothing",
                hint="set.training.gradient_clipping = 1.0, learning_rate_factor = 0.5, or save_checkpoint = true",
            )
        return change

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives an equal change."""
        return {
            "set": _nested(self.values),
            "learning_rate_factor": self.learning_rate_factor,
            "save_checkpoint": self.save_checkpoint,
            "hold_s": self.hold_s,
        }

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with the new values; raises ConfigurationError if they do not go with the rest of it."""
        return plan.replace(**_nested(self.values)) if self.values else plan

    def changes_section(self, name: str) -> bool:
        """Whether a key of that section changes."""
        return any(key.startswith(f"{name}.") for key in self.values)

    @override
    def __str__(self) -> str:
        told = [f"{key} = {show(value)}" for key, value in self.values.items()]
        if self.learning_rate_factor != 1.0:
            told.append(f"learning rates × {self.learning_rate_factor:g}")
        if self.save_checkpoint:
            told.append("a checkpoint")
        if self.hold_s:
            told.append("a hold")
        return ", ".join(told)


def _values(sections: Any) -> dict[str, Any]:
    """The keys of a nested table, checked against the plan and against what may change."""
    if not isinstance(sections, Mapping):
        raise ConfigurationError(
            "set has sections and keys of a plan: set.training.gradient_clipping = 1.0", got=repr(sections)[:100]
        )
    checked = Plan.from_dict(sections)
    keys = [f"{section}.{key}" for section, table in sections.items() for key in table]
    for key in keys:
        if key not in CHANGEABLE:
            raise ConfigurationError(
                f"{key} cannot change while a job runs",
                hint=_OTHER_WAYS.get(key, f"these can: {', '.join(CHANGEABLE)}"),
                key=key,
            )
    return {key: checked.value(key) for key in keys}


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found
