"""How many samples of a microbatch fit, by estimate: for a model that has no memory, so no step can be tried."""

from __future__ import annotations

from typing import Any

from torch import nn

from torsh_distributed.plan import Plan, TrainingConfig
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.profiling import profile_model


def largest_microbatch(model: nn.Module, example: Any, budget_bytes: int, most: int) -> tuple[int, int]:
    """The most samples up to `most` whose forward and backward stay within the budget, and their estimated peak.

    `example` is a batch of inputs. Parameters and gradients count; an optimizer's state does not. 0 if not even one
    sample fits.
    """
    profile, optimizer = profile_model(model, example=example), optimizer_named("SGD")

    def peak(count: int) -> int:
        plan = Plan(dp=1, training=TrainingConfig(batch_size=count))
        return int(estimate_memory(profile, plan, optimizer).peak_bytes)

    if peak(1) > budget_bytes:
        return 0, peak(1)
    fits, too_large = 1, most + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        fits, too_large = (middle, too_large) if peak(middle) <= budget_bytes else (fits, middle)
    return fits, peak(fits)
