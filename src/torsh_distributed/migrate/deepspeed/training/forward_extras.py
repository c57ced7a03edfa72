"""Arguments that DeepSpeed adds to the model's forward in training: layers to drop, the length of sequences."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.schedules.curriculum import CurriculumSchedule, ProgressiveLayerDrop
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings


class ForwardExtras:
    """What `progressive_layer_drop` and the legacy `curriculum_learning` of a config pass to the model.

    The model acts on them: it skips layers, or cuts sequences. One whose forward does not take them is refused here.
    """

    def __init__(self, settings: RunSettings, module: nn.Module) -> None:
        self.layer_drop: ProgressiveLayerDrop | None = None
        self._lengths: CurriculumSchedule | None = None
        require(
            not (settings.value("data_efficiency.enabled") and settings.value("data_efficiency.data_sampling.enabled")),
            "data_efficiency.data_sampling chooses samples by how hard they are, which is not done here",
            hint="turn it off, and choose them in the script: CurriculumScheduler says how hard they may be",
        )
        drop, lengths = settings.section("progressive_layer_drop"), settings.section("curriculum_learning")
        if drop.get("enabled"):
            self.layer_drop = ProgressiveLayerDrop(float(drop.get("theta", 1.0)), float(drop.get("gamma", 0.001)))
            _require_taken(module, "progressive_layer_drop", ("progressive_layer_drop", "pld_theta"))
        if lengths.get("enabled"):
            kind = lengths.get("curriculum_type", "seqlen")
            require(kind == "seqlen", "curriculum_learning.curriculum_type is seqlen", got=kind)
            self._lengths = CurriculumSchedule(lengths)
            _require_taken(module, "curriculum_learning", ("curriculum_seqlen",))

    def arguments(self, global_steps: int) -> dict[str, Any]:
        """Keyword arguments of a forward in training, after this many updates."""
        found: dict[str, Any] = {} if self.layer_drop is None else self.layer_drop.get_state()
        if self._lengths is not None:
            found["curriculum_seqlen"] = self._lengths.update_difficulty(global_steps + 1)
        return found

    def before_update(self, global_steps: int) -> None:
        """An update begins, after so many others."""
        if self.layer_drop is not None:
            self.layer_drop.update_state(global_steps)


def _require_taken(module: nn.Module, section: str, names: tuple[str, ...]) -> None:
    taken = inspect.signature(module.forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    require(
        takes_any or all(name in taken for name in names),
        f"{section} is enabled, but the model's forward takes no argument {', '.join(names)}",
        hint=f"add them to forward, where the model acts on them, or turn {section} off",
    )
