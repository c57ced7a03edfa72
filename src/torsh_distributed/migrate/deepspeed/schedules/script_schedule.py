"""Which schedule an engine steps: the script's, or that of its config."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.schedules.lr_schedules import make_schedule
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings


def choose_scheduler(settings: RunSettings, given: Any, inner: Optimizer, outer: Optimizer) -> Any:
    """The script's scheduler, or what its function makes, or the config's; None for a fixed learning rate."""
    if given is not None:
        # A scheduler object has `step`; a function makes one over the optimizer it is called with.
        if callable(given) and not hasattr(given, "step"):
            return given(inner)
        _require_its_optimizer(given, inner)
        return given
    kind = settings.value("scheduler.type")
    if kind is None:
        return None
    return make_schedule(kind, settings.value("scheduler.params", {}), outer)


def _require_its_optimizer(scheduler: Any, inner: Optimizer) -> None:
    """A scheduler of torch changes the groups of its optimizer: those of another one train nothing here."""
    if isinstance(scheduler, LRScheduler):
        require(
            any(group is one for group in inner.param_groups for one in scheduler.optimizer.param_groups),
            "Client Optimizer is not instantiated but Client LR Scheduler is instantiated: the scheduler is of another"
            " optimizer than the one that trains",
            hint="pass the scheduler's optimizer too, or a function from an optimizer to a scheduler",
        )
