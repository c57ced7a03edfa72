"""Makes the profile of a model: each distinct block is traced once, on fake tensors, for two samples and for three.

Not for one: batch norms refuse it, and a batch of one has operations of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from torsh_distributed import upward
from torsh_distributed.errors import ConfigurationError, InvalidArgument, TorshError, first_line
from torsh_distributed.parallel.models.wrapping import repeated_layers
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan, find_tensor_plan
from torsh_distributed.plan import Plan
from torsh_distributed.planner.model.block_trace import TracedRun, trace_model
from torsh_distributed.planner.model.example_batch import BatchShape, batch_shape
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
from torsh_distributed.planner.model.operation_trace import TracedSegment
from torsh_distributed.planner.model.params_by_place import AFTER, BEFORE, num_experts, param_counts, tied_numel
from torsh_distributed.planner.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

_NUM_SHOWN = 4


def profile_model(
    model: nn.Module, plan: Plan | None = None, *, sequence: int | None = None, example: Any = None
) -> ModelProfile:
    """The profile of a model, on any device, meta included; it is as before afterwards, and takes no memory.

    `plan` says in which format it computes and how tensor parallelism would split it. `example` are inputs whose first
    dim is the batch, as a tuple or by name; without it they are made from the model, of `sequence` tokens. Raises
    InvalidArgument for a model that cannot run without values, as one whose shapes depend on them.
    """
    chosen = plan or Plan()
    _refuse_unknown_sizes(model)
    if not any(param.requires_grad for param in model.parameters()):
        raise InvalidArgument(
            f"{type(model).__name__} has no parameter that is trained",
            hint="return a model of which some parameters require gradients",
        )
    shape = batch_shape(model, sequence=sequence, example=example)
    tensors, refusal = _tensor_plan(model, chosen)
    layers = repeated_layers(model)
    with _traceable(model, shape):
        one, two = (trace_model(model, layers, shape, number, chosen, tensors=tensors) for number in (2, 3))
        fused = None
        if _may_fuse_loss(model, chosen):
            fused = [trace_model(model, layers, shape, run.num_samples, chosen, known=run.known) for run in (one, two)]
    if one.calls != two.calls:
        raise InvalidArgument(
            f"{type(model).__name__} cannot be planned: two runs of its forward call other layers, so a step has no one"
            " size",
            hint="let the function return a model that leaves no layers out",
        )
    params = param_counts(model, {name: layers[name] for name, _ in one.calls}, one.called_before, tensors)
    distinct = [
        _segment(type(layers[name]).__name__, params[name], one, two, index) for index, name in enumerate(one.first_of)
    ]
    order = _with_repeats(distinct, one.calls, layers)
    return ModelProfile(
        name=type(model).__name__,
        before=_segment(BEFORE, params[BEFORE], one, two, BEFORE),
        blocks=tuple(distinct),
        order=order,
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
        notes=tuple(_notes(one, layers)),
    )


def _refuse_unknown_sizes(model: nn.Module) -> None:
    name = type(model).__name__
    if any(map(is_lazy, model.parameters())):
        raise InvalidArgument(
            f"{name} has lazy parameters, whose shapes a first batch decides",
            hint="give its layers their sizes, or let the function run one batch through it",
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InvalidArgument(
                f"{name} cannot be planned without values: the gradient of {path or name} is sparse, as large as the"
                " rows that a batch asks for",
                hint="set sparse=False for the estimate: it counts all rows",
            )


def _with_repeats(
    distinct: list[SegmentProfile], calls: list[tuple[str, int]], layers: Mapping[str, nn.Module]
) -> tuple[int, ...]:
    """Which of the distinct blocks each call is; one whose parameters were there before is added as another kind."""
    seen: set[int] = set()
    again: dict[int, int] = {}
    order = []
    for name, index in calls:
        own = {id(param) for param in layers[name].parameters()}
        if own <= seen and index not in again:
            again[index] = len(distinct)
            distinct.append(distinct[index].called_again())
        order.append(again[index] if own <= seen else index)
        seen |= own
    return tuple(order)


def _notes(run: TracedRun, layers: Mapping[str, nn.Module]) -> Iterator[str]:
    called = {name for name, _ in run.calls}
    left_out = [name for name in layers if name not in called]
    if left_out:
        more = f" and {len(left_out) - _NUM_SHOWN} more" if len(left_out) > _NUM_SHOWN else ""
        yield (
            f"its forward does not call {', '.join(left_out[:_NUM_SHOWN])}{more}: their parameters count, and nothing"
            " that they would compute"
        )
    if run.recomputes_parts:
        yield "it recomputes parts smaller than a block itself (torch.utils.checkpoint): counted as if it kept them"


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


def _fused_loss(model: nn.Module, plan: Plan, params: ParamCounts, one: TracedRun, two: TracedRun) -> FusedLoss | None:
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


def _segment(name: str, params: ParamCounts, one: TracedRun, two: TracedRun, key: Any) -> SegmentProfile:
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
        forward_live=_lines(one.peak(key, "forward"), two.peak(key, "forward")),
        backward_live=_lines(one.peak(key, "backward"), two.peak(key, "backward")),
        recomputes_itself=key in one.recomputed,
    )


def _own_inputs(run: TracedRun, segment: TracedSegment) -> int:
    numbers = {number for number in segment.inputs if run.given_to[number] < 2}
    return sum(run.trace.size_of[number] for number in numbers)


def _lines(one: Mapping[Held, int], two: Mapping[Held, int]) -> HeldBytes:
    return {held: BatchAmount.through(one.get(held, 0), two.get(held, 0)) for held in sorted({*one, *two})}
