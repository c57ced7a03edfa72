"""The demos by name."""

from __future__ import annotations

from collections.abc import Callable

from torsh_distributed.plan import Plan
from torsh_distributed.train.demos import gpt, mlp, moe
from torsh_distributed.train.demos.base import Demo

DEMOS: dict[str, Callable[[Plan], Demo]] = {
    "gpt": lambda plan: gpt.build(plan.training),
    "mlp": lambda plan: mlp.build(plan.training),
    "moe": lambda plan: moe.build(plan.training, plan.expert),
}
