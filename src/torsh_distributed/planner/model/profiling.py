"""Makes the profile of a model: each distinct block is traced once, on fake tensors, for two samples and for three.

Not for one: batch norms refuse it, and a batch of one has operations of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed import upward
from torsh_distributed.errors import ConfigurationError, InvalidArgument, TorshError, first_line
from torsh_distributed.parallel.models.wrapping import repeated_layers
from torsh_distributed.parallel.tensor.planning.planned_rows import SplitStyle
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan, find_tensor_plan
from torsh_distributed.plan import Plan
from torsh_distributed.planner.model.example_batch import BatchShape, batch_shape, loss_of_output
from torsh_distributed.planner.model.fake_model import fake_tensors
from torsh_distributed.planner.model.model_profile import (
    BatchAmount,
    FusedLoss,
    Held,
    HeldBytes,
    ModelProfile,
    ParamCounts,
    SegmentProfile,
)
from torsh_distributed.planner.model.operation_rows import operation_rows
from torsh_distributed.planner.model.operation_trace import OperationTrace, TracedSegment, follow_split_layers
from torsh_distributed.planner.model.params_by_place import AFTER, BEFORE, num_experts, param_counts, tied_numel
from torsh_distributed.planner.model.traced_experts import experts_as_trained
from torsh_distributed.planner.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    tree_leaves,
    tree_map,
)

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

_COLUMNS = {SplitStyle.COLUMN, SplitStyle.COLUMN_LOCAL, SplitStyle.COLUMN_PACKED, SplitStyle.KEY_VALUE}
_ROWS = {SplitStyle.ROW, SplitStyle.ROW_PACKED}


def profile_model(
    model: nn.Module, plan: Plan | None = None, *, sequence: int | None = None, example: Any = None
) -> ModelProfile:
    """The profile of a model, on any device, meta included; it is as before afterwards, and takes no memory.

    `plan` says in which format it computes and how tensor parallelism would split it. `example` are inputs whose first
    dim is the batch, as a tuple or by name; without it they are made from the model, of `sequence` tokens. Raises
    InvalidArgument for a model that cannot run without values, as one whose shapes depend on them.
    """
    chosen = plan or Plan()
    if not any(param.requires_grad for param in model.parameters()):
        raise InvalidArgument(
            f"{type(model).__name__} has no parameter that is trained",
            hint="return a model of which some parameters require gradients",
        )
    shape = batch_shape(model, sequence=sequence, example=example)
    tensors, refusal = _tensor_plan(model, chosen)
    layers = repeated_layers(model)
    with _traceable(model, shape):
        one, two = (_trace(model, layers, shape, number, chosen, tensors=tensors) for number in (2, 3))
        fused = None
        if _may_fuse_loss(model, chosen):
            fused = [_trace(model, layers, shape, run.num_samples, chosen, known=run.known) for run in (one, two)]
    params = param_counts(model, layers, one.called_before, tensors)
    blocks = tuple(
        _segment(type(layers[name]).__name__, params[name], one, two, index) for index, name in enumerate(one.first_of)
    )
    return ModelProfile(
        name=type(model).__name__,
        before=_segment(BEFORE, params[BEFORE], one, two, BEFORE),
        blocks=blocks,
        order=tuple(index for _, index in one.calls),
        block_names=tuple(name for name, _ in one.calls),
        after=_segment(AFTER, params[AFTER], one, two, AFTER),
        fused_loss=None if fused is None else _fused_loss(model, chosen, params[AFTER], *fused),
        tied_numel=tied_numel(model, layers, one.called_before, one.called_after),
        shared_saved=_lines(one.shared(), two.shared()),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        tokens_per_sample=shape.tokens_per_sample,
        num_experts=num_experts(model),
        tensor_refusal=refusal,
        loss_note=one.loss_note,
        computes_in=chosen.precision.dtype,
    )


@contextmanager
def _traceable(model: nn.Module, shape: BatchShape) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidArgument(
            f"{type(model).__name__} cannot be planned without values: its shapes or its way depend on them"
            f" ({type(error).__name__.removesuffix('Exception')}: {first_line(error)})",
            hint="let the function return a model without that part, or measure it: `plan_batch_size` runs trial steps",
        ) from error
    except UnsupportedOperatorException as error:
        raise InvalidArgument(
            f"{type(model).__name__} cannot be planned without values: {error} has no version for shapes alone",
            hint="register one with torch.library.register_fake",
        ) from error
    except TorshError:
        raise
    except Exception as error:  # a forward may raise anything on inputs that it was not written for
        raise InvalidArgument(
            f"{type(model).__name__} does not run on {shape.in_words()}: {type(error).__name__}: {first_line(error)}",
            hint="let a function return (model, example), and name it as module:function: a tuple of inputs, or a"
            " mapping of the arguments of forward, of one sample or more",
        ) from error


def _tensor_plan(model: nn.Module, plan: Plan) -> tuple[TensorPlan | None, str | None]:
    """How any tensor parallelism would split the model; or why none can."""
    degree = plan.mesh.tp if plan.mesh.tp > 1 else 2
    try:
        return find_tensor_plan(model, tp=degree, config=plan.tensor), None
    except (ConfigurationError, InvalidArgument) as error:
        if plan.mesh.tp > 1:
            raise
        return None, error.message


def _may_fuse_loss(model: nn.Module, plan: Plan) -> bool:
    """Whether some layout of the plan computes the loss without whole logits."""
    wanted, logits = plan.training.fused_loss, upward.load(upward.DEFERRED_LOGITS)
    return wanted is True or (wanted == "auto" and bool(logits.has_large_head(model)))


def _fused_loss(model: nn.Module, plan: Plan, params: ParamCounts, one: _Run, two: _Run) -> FusedLoss | None:
    """Head and loss of two traces with deferred logits; None if the loss has asked for the logits themselves."""
    first, second = one.segments[AFTER].fused_loss, two.segments[AFTER].fused_loss
    if first is None or second is None:
        return None
    logits = upward.load(upward.DEFERRED_LOGITS)
    return FusedLoss(
        after=_segment(AFTER, params, one, two, AFTER),
        tokens=BatchAmount.through(first.num_tokens, second.num_tokens),
        num_classes=first.num_classes,
        width=first.width,
        itemsize=first.itemsize,
        copies_head=first.copies_head,
        is_automatic=logits.has_large_head(model),
        is_apart=logits.is_head_apart(model, plan),
    )


@dataclass
class _Run:
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
    loss_note: str = ""

    def saved(self, key: Any, *, selective_only: bool = False) -> dict[Held, int]:
        """Kept for backward by one call of a segment, without what many blocks share."""
        segment = self.segments[key]
        numbers = {*segment.selective, *segment.inputs} if selective_only else {*segment.saved}
        return self._by_kind(number for number in numbers if self.given_to[number] < 2)

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

    def __init__(self, name: str, block: nn.Module, run: _Run) -> None:
        self._name, self._block, self._run = name, block, run
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        key = repr((type(self._block), repr(self._block), tree_map(_describe, (args, kwargs)), _shapes(self._block)))
        if key not in run.known:
            index = len(run.first_of)
            run.first_of.append(self._name)
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
            fresh = tree_map(_fresh, out)
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


def _trace(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    shape: BatchShape,
    num_samples: int,
    plan: Plan,
    *,
    tensors: TensorPlan | None = None,
    known: dict[str, tuple[int, Any]] | None = None,
) -> _Run:
    """One trace. With `known`, what an earlier one has found of the blocks, it is one with deferred logits."""
    was_training = [module.training for module in model.modules()]
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors(model))
        del mode
        trace = OperationTrace([*model.parameters(), *model.buffers()])
        run = _Run(trace, num_samples, {} if known is None else known)
        trace.segment = run.segments[BEFORE]
        stack.callback(follow_split_layers(trace, _split_modules(model, tensors)))
        for name, module in model.named_modules():
            if not any(name == one or name.startswith(f"{one}.") for one in layers):
                stack.callback(module.register_forward_pre_hook(_noting(run, name)).remove)
        for name, block in layers.items():
            vars(block)["forward"] = _TracedBlock(name, block, run)
        if known is not None:
            upward.load(upward.DEFERRED_LOGITS).defer_logits(model)
        dtype = _DTYPES[plan.precision.dtype]
        stack.enter_context(experts_as_trained(model, is_cast=dtype is torch.bfloat16))
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
        after.gradients = {trace.number(one.grad) for one in model.parameters() if one.grad is not None}
        del loss
    for module, training in zip(model.modules(), was_training, strict=True):
        module.training = training
    return run


def _noting(run: _Run, name: str) -> Callable[..., None]:
    def note(*_: object) -> None:
        (run.called_after if run.calls else run.called_before).add(name)

    return note


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


def _segment(name: str, params: ParamCounts, one: _Run, two: _Run, key: Any) -> SegmentProfile:
    first, second = one.segments[key], two.segments[key]

    def line(what: Callable[[TracedSegment], float]) -> BatchAmount:
        return BatchAmount.through(what(first), what(second))

    return SegmentProfile(
        name=name,
        params=params,
        forward_flops=line(lambda segment: segment.forward_flops),
        total_flops=line(lambda segment: segment.total_flops),
        forward_moved=line(lambda segment: segment.moved["forward"]),
        backward_moved=line(lambda segment: segment.moved["backward"]),
        forward_rows=operation_rows(first.operations["forward"], second.operations["forward"]),
        backward_rows=operation_rows(first.operations["backward"], second.operations["backward"]),
        num_forward_kernels=first.num_kernels["forward"],
        num_backward_kernels=first.num_kernels["backward"],
        saved=_lines(one.saved(key), two.saved(key)),
        selective_saved=_lines(one.saved(key, selective_only=True), two.saved(key, selective_only=True)),
        input_bytes=BatchAmount.through(_own_inputs(one, first), _own_inputs(two, second)),
        output_bytes=line(lambda segment: segment.output_bytes),
        forward_live=_lines(one.trace.peak(first, "forward"), two.trace.peak(second, "forward")),
        backward_live=_lines(one.trace.peak(first, "backward"), two.trace.peak(second, "backward")),
    )


def _own_inputs(run: _Run, segment: TracedSegment) -> int:
    numbers = {number for number in segment.inputs if run.given_to[number] < 2}
    return sum(run.trace.size_of[number] for number in numbers)


def _lines(one: Mapping[Held, int], two: Mapping[Held, int]) -> HeldBytes:
    return {held: BatchAmount.through(one.get(held, 0), two.get(held, 0)) for held in sorted({*one, *two})}


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
    return _begun(torch.empty(value.shape, dtype=value.dtype).requires_grad_(value.requires_grad))


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
