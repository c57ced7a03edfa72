"""The difficulty of the curriculum at a step, as DeepSpeed computes it, and the share of layers that are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan.problems import did_you_mean

_log = logging.getLogger(__name__)

_NEEDED: dict[str, tuple[str, ...]] = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "custom": (),
}
"""Schedule type to the keys of its `schedule_config`."""


class CurriculumSchedule:
    """From `min_difficulty` to `max_difficulty`, in steps; `config` is a metric's section of a DeepSpeed file.

    Difficulty only rises: once `update_difficulty` has reached the maximum it stays there.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if name not in config:
                raise ConfigurationError(f"a curriculum needs {name}", hint="add it to the curriculum's section")
        kind = config["schedule_type"]
        if kind not in _NEEDED:
            raise ConfigurationError(
                f"schedule_type {kind!r} is not a curriculum of DeepSpeed",
                hint=did_you_mean(str(kind), _NEEDED) or f"it has: {', '.join(_NEEDED)}",
            )
        details: Mapping[str, Any] = config.get("schedule_config", {})
        for name in _NEEDED[kind]:
            if name not in details:
                raise ConfigurationError(f"schedule_type {kind} needs schedule_config.{name}", hint="add it there")
        self._kind = kind
        self._details = details
        self.min_difficulty = config["min_difficulty"]
        self.max_difficulty = config["max_difficulty"]
        self.current_difficulty = self.min_difficulty
        self._custom: Callable[[int], int] | None = None
        if kind == "fixed_discrete":
            _require_one_more(details["difficulty"], details["max_step"])
        elif kind != "custom" and details["difficulty_step"] % 8:
            _log.warning(
                "difficulty_step %s is not a multiple of 8: for lengths of sequences, tensor cores need one",
                details["difficulty_step"],
            )

    def set_custom_get_difficulty(self, function: Callable[[int], int]) -> None:
        """The difficulty of a step, for schedule_type custom."""
        self._custom = function

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty that belongs to a step, whatever was reached before."""
        if self._kind == "custom":
            if self._custom is None:
                raise InvalidArgument(
                    "schedule_type custom has no function", hint="call set_custom_get_difficulty before training"
                )
            return self._custom(global_steps)
        if self._kind == "fixed_discrete":
            levels = zip(self._details["max_step"], self._details["difficulty"], strict=False)
            found: int = next(
                (level for last, level in levels if global_steps <= last), self._details["difficulty"][-1]
            )
            return found
        degree = self._details["root_degree"] if self._kind == "fixed_root" else 1
        share = (global_steps / self._details["total_curriculum_step"]) ** (1.0 / degree)
        step = self._details["difficulty_step"]
        reached = math.floor(self.min_difficulty + share * (self.max_difficulty - self.min_difficulty))
        lowest = math.ceil(self.min_difficulty / step) * step
        return int(min(max(reached - reached % step, lowest), self.max_difficulty))

    def update_difficulty(self, global_steps: int) -> int:
        """The difficulty of a step from now on; it is kept as `current_difficulty`."""
        if self.current_difficulty < self.max_difficulty:
            self.current_difficulty = self.get_difficulty(global_steps)
        return int(self.current_difficulty)

    def state_dict(self) -> dict[str, Any]:
        """What was reached."""
        return {"current_difficulty": self.current_difficulty}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was reached."""
        self.current_difficulty = state["current_difficulty"]


class ProgressiveLayerDrop:
    """The share of layers that training keeps: from 1 down to `theta`, faster with a larger `gamma`."""

    def __init__(self, theta: float = 1.0, gamma: float = 0.001) -> None:
        if not 0 < theta <= 1:
            raise InvalidArgument("progressive_layer_drop.theta is a share above 0, at most 1", theta=theta)
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def update_state(self, global_step: int) -> None:
        """Move to that step."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta

    def get_theta(self) -> float:
        """The share of layers that is kept now."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """Keyword arguments for the model's forward, as DeepSpeed passes them."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}


def _require_one_more(difficulties: Any, last_steps: Any) -> None:
    if not last_steps or len(difficulties) != len(last_steps) + 1:
        raise ConfigurationError(
            f"schedule_config.difficulty has {len(difficulties)} values and max_step {len(last_steps)}",
            hint="give one difficulty more than steps: the last one holds for all that follow",
        )
