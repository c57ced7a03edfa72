"""Runs a model on a small example before and after its layers are split, and compares what it computes.

A plan is made by looking at modules. What a forward does with their results (a reshape by a number that it keeps under
a name of its own, a table with an entry for each head) only a run can show, and better now than in the first step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.tensor.apply import tensor_parallel_context
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan
from torsh_distributed.parallel.torch_internals import tree_leaves

_ROUNDING = 1e-3
_HALF_ROUNDING = 0.3
"""Half precision may also send a token to another expert; a wrong split changes results altogether."""


class SplitCheck:
    """Made of a whole model, with what it computes on `example`; `compare` refuses the split model if that differs."""

    def __init__(self, model: nn.Module, example: Mapping[str, Any]) -> None:
        self._model = model
        self._example = example
        with trying(model):
            self._expected = _first_result(model(**example))

    def compare(self, plan: TensorPlan, group: dist.ProcessGroup) -> None:
        """Raise ConfigurationError, on all ranks alike, unless the split model computes the same."""
        with fail_together("run the model once its layers are split", group):
            running: list[str] = []
            try:
                with trying(self._model), tensor_parallel_context(plan), naming(self._model, running):
                    found = _first_result(self._model(**self._example))
            except Exception as error:
                # The model's own code runs here, on pieces of what it expects: it may raise anything.
                where = running[-1] if running else "forward"
                said = next(iter(str(error).splitlines()), type(error).__name__)
                raise self._refusal(
                    f"cannot run once mesh.tp {plan.tp} has split it: {where} says {said}",
                    re.sub(r"(?<=\.)\d+(?=\.)", "*", f"{where}.*=replicated"),
                ) from error
            if not _alike(found, self._expected):
                what = f"does not compute the same once mesh.tp {plan.tp} has split its layers"
                raise self._refusal(what, "*.self_attn.*=replicated")

    def _refusal(self, what: str, override: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self._model).__name__} {what}",
            hint=f'leave layers whole, such as tensor.overrides = ["{override}"]; `torsh plan show --model` prints how'
            " they are split; or set mesh.tp = 1",
        )


def _first_result(out: Any) -> Tensor | None:
    """The logits of a model, or whatever tensor of numbers it returns first; whole."""
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return whole_of(leaf)
    return None


def _alike(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape:
        return False
    limit = _ROUNDING if expected.dtype in (torch.float32, torch.float64) else _HALF_ROUNDING
    one, other = (torch.nan_to_num(tensor.double()) for tensor in (found, expected))
    return bool((one - other).norm() <= limit * other.norm())


@contextmanager
def naming(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the names of the modules whose forward runs in `running`, the innermost last."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(_enter, running, name)))
        handles.append(module.register_forward_hook(partial(_leave, running)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(running: list[str], name: str, *_: object) -> None:
    running.append(name)


def _leave(running: list[str], *_: object) -> None:
    running.pop()
