"""Runs a model on a small example before and after its layers are split, and compares what it computes.

A plan is made by looking at modules. What a forward does with their results (a reshape by a number that it keeps under
a name of its own, a table with an entry for each head) only a run can show, and better now than in the first step.

Stage boundaries under sequence parallelism: stages send pieces of the sequence and restore them on arrival.
Each tensor-parallel rank sends its piece to its counterpart in the next stage: no gather, a fraction of the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import override

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.pipeline import StagePlan
from torsh_distributed.parallel.pipeline.runtime import Wrap
from torsh_distributed.parallel.tensor.apply import tensor_parallel_context
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan
from torsh_distributed.parallel.torch_internals import tree_leaves


def sequence_edges(plan: StagePlan, mesh: DeviceMesh) -> Wrap:
    """Wraps a stage so activations enter and leave it as plain pieces of the sequence."""
    last = len(plan.stages) - 1

    def wrap(index: int, stage: nn.Module) -> nn.Module:
        arriving = plan.edges[index - 1] if index else ()
        leaving = plan.edges[index] if index < last else ()
        return _Edges(stage, mesh, arriving, leaving)

    return wrap


class _Edges(nn.Module):
    def __init__(self, stage: nn.Module, mesh: DeviceMesh, arriving: Sequence[bool], leaving: Sequence[bool]) -> None:
        super().__init__()
        self.stage = stage
        self._mesh, self._arriving, self._leaving = mesh, arriving, leaving

    @override
    def forward(self, *inputs: Any) -> Any:
        if self._arriving:
            flags = zip(inputs, self._arriving, strict=True)
            inputs = tuple(self._split(one) if is_activation else one for one, is_activation in flags)
        out = self.stage(*inputs)
        if not self._leaving:
            return out
        values = out if isinstance(out, tuple) else (out,)
        pieces = tuple(
            self._piece(one) if is_activation else one for one, is_activation in zip(values, self._leaving, strict=True)
        )
        return pieces if isinstance(out, tuple) else pieces[0]

    def _split(self, piece: Tensor) -> Tensor:
        return DTensor.from_local(piece, self._mesh, [Shard(1)], run_check=False) if _has_sequence(piece) else piece

    def _piece(self, value: Tensor) -> Tensor:
        if not _has_sequence(value):
            return value
        whole = value
        if not isinstance(whole, DTensor):
            whole = DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)
        local: Tensor = whole.redistribute(placements=[Shard(1)]).to_local()
        return local


def _has_sequence(value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() > 2


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
