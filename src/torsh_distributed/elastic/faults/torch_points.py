"""The points of a plain torch loop: steps from the optimizer, forward and backward from torch, for scripts without us.

Silent as soon as an Engine, or a loop of its own, reports steps itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torsh_distributed import events


class TorchPoints:
    """Reports `step`, `forward`, `backward`, `optimizer` and `all_reduce` of code that calls torch alone."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._is_in_step = False
        self._is_reporting = False
        self._is_needed = True

    def install(self) -> None:
        """Hook into torch, for the rest of the process."""
        events.watch_points(self._notice)
        register_module_forward_pre_hook(self._before_forward)
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        torch.autograd.backward = self._reporting(torch.autograd.backward, "backward")
        dist.all_reduce = self._reporting(dist.all_reduce, "all_reduce")

    def _notice(self, point: str, step: int | None) -> None:
        if not self._is_reporting and point == "step":
            self._is_needed = False

    def _report(self, point: str, step: int | None = None) -> None:
        if not self._is_needed:
            return
        self._is_reporting = True
        try:
            events.reached(point, step)
        finally:
            self._is_reporting = False

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self._is_in_step or not module.training or not torch.is_grad_enabled():
            return
        self._is_in_step = True
        self._report("step", self._num_steps)
        self._report("forward")

    def _before_update(self, *_: object) -> None:
        self._report("optimizer")

    def _after_update(self, *_: object) -> None:
        self._num_steps += 1
        self._is_in_step = False

    def _reporting(self, function: Any, point: str) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._report(point)
            return function(*args, **kwargs)

        return call
