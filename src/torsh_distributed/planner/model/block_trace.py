"""Runs a model on fake tensors: each distinct block is traced by itself once, others only give shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from typing_extensions import override

from torsh_distributed import upward
from torsh_distributed.parallel.tensor.planning.planned_rows import SplitStyle
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan
from torsh_distributed.plan import Plan
from torsh_distributed.planner.model.example_batch import BatchShape, loss_of_output
from torsh_distributed.planner.model.fake_model import fake_tensors
from torsh_distributed.planner.model.model_profile import Held
from torsh_distributed.planner.model.operation_trace import OperationTrace, Phase, TracedSegment, follow_split_layers
from torsh_distributed.planner.model.params_by_place import AFTER, BEFORE
from torsh_distributed.planner.model.traced_experts import experts_as_trained
from torsh_distributed.planner.torch_internals import tree_leaves, tree_map

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

_COLUMNS = {SplitStyle.COLUMN, SplitStyle.COLUMN_LOCAL, SplitStyle.COLUMN_PACKED, SplitStyle.KEY_VALUE}
_ROWS = {SplitStyle.ROW, SplitStyle.ROW_PACKED}


@dataclass
class TracedRun:
    """One trace of the whole model."""

    trace: OperationTrace
    num_samples: int
    known: dict[str, tuple[int, Any]]
    """Distinct blocks that are traced already: their numbers and results."""
    segments: dict[Any, TracedSegment] = field(
        default_factory=lambda: {BEFORE: TracedSegment(), AFTER: TracedSegment()}
    )
    """By number of a distinct block, and the two around the blocks."""
    first_of: list[str] = field(default_factory=list)
    """The first block of each distinct one."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    given_to: Counter[int] = field(default_factory=Counter)
    """Storage to the number of blocks that it is given to."""
    called_before: set[str] = field(default_factory=set)
    called_after: set[str] = field(default_factory=set)
    recomputed: set[int] = field(default_factory=set)
    """Distinct blocks that the model itself recomputes in backward."""
    recomputes_parts: bool = False
    """Whether it recomputes something that is no block."""
    loss_note: str = ""
    beginnings: list[list[Tensor]] = field(default_factory=list)
    """By call of a block, the leaves at which its results begin a graph."""
    _depth: int = 0
    """Regions of `torch.utils.checkpoint` that the forward is in."""

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, what is called is what the model recomputes in backward; here it is run once, and seen."""
        before = len(self.calls)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self.recomputes_parts |= len(self.calls) == before

    @property
    def is_recomputing(self) -> bool:
        """Whether the forward is in a region that the model recomputes."""
        return self._depth > 0

    def saved(self, key: Any, *, selective_only: bool = False) -> dict[Held, int]:
        """Kept for backward by one call of a segment, without what many blocks share."""
        segment = self.segments[key]
        numbers = {*segment.selective, *segment.inputs} if selective_only else {*segment.saved}
        return self._by_kind(number for number in numbers if self.given_to[number] < 2)

    def peak(self, key: Any, phase: Phase) -> dict[Held, int]:
        """Alive at the peak of a segment's phase; what is computed between blocks and given to one, it has saved."""
        without = self.given_to if key == AFTER else ()
        return self.trace.peak(self.segments[key], phase, without=without)

    def shared(self) -> dict[Held, int]:
        """Kept once for all blocks."""
        keys = {number for segment in self.segments.values() for number in segment.saved}
        return self._by_kind(number for number in keys if self.given_to[number] > 1)

    def _by_kind(self, numbers: Iterator[int]) -> dict[Held, int]:
        found: dict[Held, int] = {}
        for number in numbers:
            held = self.trace.held(number)
            found[held] = found.get(held, 0) + self.trace.size_of[number]
        return found


class _TracedBlock:
    """Takes the place of a block's forward: the first of each kind is traced by itself, others only give shapes.

    Each result begins a graph of its own, so a block's backward is run, and seen, by itself.
    """

    def __init__(self, name: str, block: nn.Module, run: TracedRun) -> None:
        self._name, self._block, self._run = name, block, run
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        way = torch.is_grad_enabled(), run.is_recomputing
        given = tree_map(_describe, (args, kwargs))
        key = repr((type(self._block), repr(self._block), given, _shapes(self._block), way))
        if key not in run.known:
            index = len(run.first_of)
            run.first_of.append(self._name)
            if run.is_recomputing:
                run.recomputed.add(index)
            run.segments[index] = TracedSegment()
            outside, run.trace.segment = run.trace.segment, run.segments[index]
            out = self._traced(run.segments[index], args, kwargs)
            run.trace.segment = outside
            run.known[key] = (index, out)
        index, out = run.known[key]
        run.calls.append((self._name, index))
        for number in {run.trace.number(leaf) for leaf in _tensors((args, kwargs))}:
            run.given_to[number] += 1
        with run.trace.unseen():
            leaves = tree_map(_fresh, out)
            run.beginnings.append([leaf for leaf in _tensors(leaves) if leaf.requires_grad])
            fresh = tree_map(_begun, leaves)
        run.trace.segment = run.segments[AFTER]
        return fresh

    def _traced(self, segment: TracedSegment, args: Any, kwargs: Any) -> Any:
        """Runs forward and backward of this block alone; returns shapes of its results."""
        trace = self._run.trace
        leaves = tree_map(_leaf, (args, kwargs))
        segment.inputs = [trace.number(leaf) for leaf in _tensors(leaves)]
        with trace.unseen():
            args, kwargs = tree_map(_begun, leaves)
        out = self._forward(*args, **kwargs)
        results = [leaf for leaf in _tensors(out) if leaf.requires_grad]
        segment.output_bytes = sum(leaf.nbytes for leaf in results)
        described = tree_map(_describe_out, out)
        wanted = [one for one in (*_tensors(leaves), *self._block.parameters()) if one.requires_grad]
        del args, kwargs, out, leaves
        trace.phase = "backward"
        if results and wanted:
            gradients = torch.autograd.grad(
                results, wanted, [torch.ones_like(one) for one in results], allow_unused=True, materialize_grads=False
            )
            owned = len(wanted) - sum(1 for _ in (p for p in self._block.parameters() if p.requires_grad))
            segment.gradients = {trace.number(one) for one in gradients[owned:] if one is not None}
            del gradients
        results.clear()
        trace.phase = "forward"
        return described


def trace_model(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    shape: BatchShape,
    num_samples: int,
    plan: Plan,
    *,
    tensors: TensorPlan | None = None,
    known: dict[str, tuple[int, Any]] | None = None,
) -> TracedRun:
    """One trace. With `known`, what an earlier one has found of the blocks, it is one with deferred logits."""
    was_training = [module.training for module in model.modules()]
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors(model))
        del mode
        trace = OperationTrace([*model.parameters(), *model.buffers()])
        run = TracedRun(trace, num_samples, {} if known is None else known)
        trace.segment = run.segments[BEFORE]
        stack.callback(follow_split_layers(trace, _split_modules(model, tensors)))
        for name, module in model.named_modules():
            if not any(name == one or name.startswith(f"{one}.") for one in layers):
                stack.callback(module.register_forward_pre_hook(_noting(run, name)).remove)
        for name, block in layers.items():
            vars(block)["forward"] = _TracedBlock(name, block, run)
        if known is not None:
            upward.load(upward.DEFERRED_LOGITS).defer_logits(model)
        dtype = DTYPES[plan.precision.dtype]
        stack.enter_context(experts_as_trained(model, is_cast=dtype is torch.bfloat16))
        stack.enter_context(_own_checkpoints(run))
        model.train()
        inputs = shape.make(num_samples)
        stack.enter_context(trace)
        stack.enter_context(trace.saving())
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            if not layers:
                trace.segment = run.segments[AFTER]
            loss, run.loss_note = loss_of_output(model(**inputs), shape)
        trace.phase = "backward"
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        after = run.segments[AFTER]
        # Gradients of results arrive one by one: each is gone when its block's backward is, but for the last block's.
        gone = (leaf for leaves in run.beginnings[:-1] for leaf in leaves)
        after.gradients = {trace.number(one.grad) for one in (*model.parameters(), *gone) if one.grad is not None}
        run.beginnings.clear()
        del loss
    for module, training in zip(model.modules(), was_training, strict=True):
        module.training = training
    return run


def _split_modules(
    model: nn.Module, tensors: TensorPlan | None
) -> Iterator[tuple[nn.Module, Literal["columns", "rows", "inside"]]]:
    modules = dict(model.named_modules())
    for row in () if tensors is None else tensors.modules:
        module = modules.get(row.name)
        if module is None:
            continue
        if row.style in _COLUMNS:
            yield module, "columns"
        elif row.style in _ROWS:
            yield module, "rows"
        elif row.style is SplitStyle.EXPERTS:
            yield module, "inside"


@contextmanager
def _own_checkpoints(run: TracedRun) -> Iterator[None]:
    """Inside, `torch.utils.checkpoint` runs what it is given once: forward and backward of each block are seen anyway.

    Left to itself it would hide what a block keeps, and run it again while its backward is traced.
    """

    def without_hooks(*_: Any, **__: Any) -> Iterator[None]:
        with run.recomputing():
            yield

    def at_once(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        with run.recomputing():
            return function(*args)

    before = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = without_hooks
    checkpoint.CheckpointFunction.apply = at_once
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = before
        del checkpoint.CheckpointFunction.apply


def _noting(run: TracedRun, name: str) -> Callable[..., None]:
    def note(*_: object) -> None:
        (run.called_after if run.calls else run.called_before).add(name)

    return note


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _describe(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else type(value).__name__


@dataclass(frozen=True)
class _OutShape:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _describe_out(value: Any) -> Any:
    return _OutShape(tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else value


def _fresh(value: Any) -> Any:
    if not isinstance(value, _OutShape):
        return value
    return torch.empty(value.shape, dtype=value.dtype).requires_grad_(value.requires_grad)


class _Begin(torch.autograd.Function):
    """The same storage as a result of a graph: a block may change it in place, which a leaf does not allow."""

    @staticmethod
    @override
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        # No view in the eyes of autograd, which allows no changes of views that a function returns.
        return torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage(), 0, leaf.shape, leaf.stride())

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _begun(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return _Begin.apply(value)  # type: ignore[no-untyped-call]  # untyped in torch


def _shapes(block: nn.Module) -> Any:
    return [(tuple(param.shape), param.dtype, param.requires_grad) for param in block.parameters()]
