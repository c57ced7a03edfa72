"""What an optimizer keeps for each parameter and needs while it updates: found by a step on small fake tensors."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan.problems import did_you_mean
from torsh_distributed.planner.model.operation_trace import OperationTrace
from torsh_distributed.planner.torch_internals import FakeTensorMode

_NUM_PARAMS = 4
_SHAPE = (256, 256)


@dataclass(frozen=True)
class OptimizerProfile:
    """Bytes of an optimizer for each byte of trained parameters."""

    name: str
    state_ratio: float
    """Kept between steps."""
    temporary_ratio: float
    """At the peak of a step over many tensors at once, as torch updates on a GPU."""
    single_ratio: float
    """The same where one tensor after the other is updated, as on a CPU: for each byte of the largest one."""

    def temporary_bytes(self, trained_bytes: float, largest_bytes: float, device_type: str) -> float:
        """The memory that a step takes beside parameters, gradients and state."""
        together = device_type != "cpu"
        return self.temporary_ratio * trained_bytes if together else self.single_ratio * largest_bytes


def optimizer_named(name: str) -> OptimizerProfile:
    """The profile of an optimizer of torch.optim, such as AdamW; names are compared without case."""
    return _measured(optimizer_kind(name))


def optimizer_kind(name: str) -> Any:
    """The class in torch.optim, with its name compared without case."""
    kinds = {one.lower(): kind for one, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    if name.lower() not in kinds:
        raise InvalidArgument(
            f"torch.optim has no optimizer {name}",
            hint=did_you_mean(name.lower(), kinds) or f"one of {', '.join(sorted(kinds))}",
        )
    return kinds[name.lower()]


def optimizer_or_assumed(name: str) -> tuple[OptimizerProfile, str]:
    """The profile of an optimizer by the name of its class, and a note where it is unknown: that of AdamW then."""
    try:
        return optimizer_named(name), ""
    except InvalidArgument as error:
        return optimizer_named("AdamW"), f"counted with the state of AdamW: {error.message}"


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


@functools.cache
def _measured(kind: Any) -> OptimizerProfile:
    single = _step(kind, 1, foreach=False)
    together = _step(kind, _NUM_PARAMS, foreach=True) or _step(kind, _NUM_PARAMS, foreach=False)
    if single is None or together is None:
        raise InvalidArgument(
            f"{kind.__name__} cannot be tried: its step needs more than gradients",
            hint="plan for an optimizer of its family, such as AdamW",
        )
    return OptimizerProfile(kind.__name__, single[0], together[1] / _NUM_PARAMS, single[1])


def _step(kind: Any, num_params: int, *, foreach: bool) -> tuple[float, float] | None:
    """State over parameters, and the peak of temporaries over one parameter; None if it takes no such step."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(_SHAPE)) for _ in range(num_params)]
        try:
            options: dict[str, Any] = {"foreach": True} if foreach else {}
            optimizer = kind(params, lr=1e-3, **options)
            for param in params:
                param.grad = torch.empty(_SHAPE)
            # Without hooks of this process: a job's own would count these as steps of its training.
            step = inspect.unwrap(kind.step)
            with torch.no_grad():
                step(optimizer)  # makes the state
                with OperationTrace(params) as trace:
                    step(optimizer)
        except Exception:
            # An optimizer may refuse these tensors, this option or a step without a closure, in any way.
            return None
        each = params[0].nbytes
        tensors = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
        state = sum(one.nbytes for one in tensors if one.dim() > 0)
        peak = sum(trace.peak(trace.segment, "forward").values())
        return state / (each * num_params), peak / each
