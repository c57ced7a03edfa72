"""Watches a model's operations on fake tensors: what they cost, what is alive when, what is kept for backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import sdpa_flop_count
from typing_extensions import override

from torsh_distributed.observe.loops.counted_operations import flops_of
from torsh_distributed.parallel.activation import is_costly
from torsh_distributed.planner.model.model_profile import Held
from torsh_distributed.planner.model.value_questions import answer_without_values
from torsh_distributed.planner.torch_internals import TorchDispatchMode, tree_leaves

Phase = Literal["forward", "backward"]


class TracedOperation(NamedTuple):
    """One operation, for one number of samples."""

    name: str
    flops: int
    moved: int
    shape: tuple[int, int, int, int] | None
    """How many products, rows, columns, length of the sums."""


class TracedLoss(NamedTuple):
    """A loss that computes logits for some tokens at a time."""

    num_tokens: int
    num_classes: int
    width: int
    itemsize: int
    copies_head: bool


@dataclass
class TracedSegment:
    """What happened while one part of the model ran, for one number of samples."""

    forward_flops: int = 0
    total_flops: int = 0
    moved: Counter[str] = field(default_factory=Counter)
    """By phase: bytes of operations that count no flops."""
    num_kernels: Counter[str] = field(default_factory=Counter)
    operations: dict[str, list[TracedOperation]] = field(default_factory=lambda: {"forward": [], "backward": []})
    """By phase, in order."""
    saved: dict[int, int] = field(default_factory=dict)
    """Storage to bytes."""
    selective: set[int] = field(default_factory=set)
    """Storages that the result of a costly operation is in."""
    changes: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"forward": [], "backward": []})
    """By phase: storage, and the bytes that came (above 0) or went."""
    inputs: list[int] = field(default_factory=list)
    """Storages that were given to it."""
    input_bytes: int = 0
    output_bytes: int = 0
    gradients: set[int] = field(default_factory=set)
    """Storages that are gradients of parameters."""
    fused_loss: TracedLoss | None = None


class OperationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While it is entered, adds what happens on fake tensors to `segment`.

    A storage has a number that is never used again: addresses are. Which of its bytes a tensor-parallel rank holds
    follows the data: the output of a layer split by columns is split, so is what is computed from it, until a layer
    split by rows.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.segment = TracedSegment()
        self.phase: Phase = "forward"
        self.held_as: dict[int, Held] = {}
        self.size_of: dict[int, int] = {}
        self._number_of: dict[int, int] = {}
        self._last = 0
        self._params = {self.number(param) for param in params}

    # --- storages ----------------------------------------------------------------------------------------------

    def number(self, tensor: Tensor) -> int:
        """The number of the storage of a tensor."""
        storage = tensor.untyped_storage()
        known = self._number_of.get(storage._cdata)
        if known is not None:
            return known
        self._last += 1
        self._number_of[storage._cdata] = self._last
        self.size_of[self._last] = storage.nbytes()
        weakref.finalize(storage, self._forget, storage._cdata, self._last)
        return self._last

    def _forget(self, address: int, number: int) -> None:
        if self._number_of.get(address) == number:
            del self._number_of[address]
        self.segment.changes[self.phase].append((number, -self.size_of[number]))

    def mark(self, value: Any, held: Held) -> None:
        """Say how a rank holds the tensors in `value`."""
        for leaf in _tensors(value):
            self.held_as[self.number(leaf)] = held

    def held(self, number: int) -> Held:
        """How a tensor-parallel rank holds a storage."""
        return self.held_as.get(number, Held.HIDDEN)

    # --- operations --------------------------------------------------------------------------------------------

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = answer_without_values(func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        given = list(_tensors((args, kwargs)))
        before = {self.number(leaf) for leaf in given}
        # What deferred logits compute to know a shape has no memory.
        fresh = [leaf for leaf in _tensors(out) if not leaf.is_meta and self.number(leaf) not in before]
        segment = self.segment
        if _is_fused_loss(func):
            fresh = self._without_head_gradients(args, out)
        if not fresh and not _is_in_place(func):
            return out
        counted = flops_of(func, args, kwargs or {}, out)
        if counted is not None and self.phase == "forward":
            segment.forward_flops += counted[0]
            segment.total_flops += counted[1]
        moved = sum(leaf.nbytes for leaf in (*given, *fresh))
        if counted is None:
            segment.moved[self.phase] += moved
        segment.num_kernels[self.phase] += 1
        if segment.fused_loss is not None and _is_fused_loss(func):
            segment.operations[self.phase] += _products_of(segment.fused_loss)
        else:
            flops = 0 if counted is None else counted[0]
            segment.operations[self.phase].append(_traced(func, args, out, moved, flops))
        held = self._held_after(func, before)
        for leaf in fresh:
            number = self.number(leaf)
            segment.changes[self.phase].append((number, self.size_of[number]))
            if held is not None:
                self.held_as[number] = held
            if is_costly(func) and self.phase == "forward":
                segment.selective.add(number)
        return out

    def _without_head_gradients(self, args: Any, out: Any) -> list[Tensor]:
        """Notes a fused loss; its results but for the gradients of head and bias, whose size no batch changes.

        Whether that buffer is the gradient itself, or there beside it, depends on the plan.
        """
        hidden, weight, dtype = args[0], args[1], args[6]
        loss, to_hidden, *to_head = out
        classes, width = weight.shape
        self.segment.fused_loss = TracedLoss(
            hidden.shape[0], classes, width, dtype.itemsize, copies_head=weight.dtype is not dtype
        )
        self._params.update(map(self.number, to_head))
        return [loss, to_hidden]

    def _held_after(self, func: Any, given: set[int]) -> Held | None:
        if func is torch.ops.aten._to_copy.default and given <= self._params:
            return Held.WEIGHTS
        return Held.SPLIT if any(self.held_as.get(one) is Held.SPLIT for one in given) else None

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, operations are nobody's: those that only prepare the trace."""
        outside, self.segment = self.segment, TracedSegment()
        try:
            yield
        finally:
            self.segment = outside

    # --- what is kept for backward -----------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, what autograd keeps is noted in the current segment."""

        def note(tensor: Tensor) -> Tensor:
            number = self.number(tensor)
            if number not in self._params:
                self.segment.saved[number] = self.size_of[number]
            # Not the tensor itself: an output that keeps its own graph alive would never be freed.
            return tensor.detach()

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield

    def peak(self, segment: TracedSegment, phase: Phase, *, without: Container[int] = ()) -> dict[Held, int]:
        """The bytes alive at the peak of a phase that came to life in this segment, by how a rank holds them.

        `without` are storages that are counted elsewhere.
        """
        alive: dict[int, int] = {}
        if phase == "backward":
            for number, change in segment.changes["forward"]:
                if number not in without:
                    _apply(alive, number, change)
        largest, now = {} if phase == "forward" else dict(alive), sum(alive.values())
        most = now if phase == "backward" else 0
        for number, change in segment.changes[phase]:
            if number in segment.gradients or number in without or (change < 0 and number not in alive):
                continue
            _apply(alive, number, change)
            now += change
            if now > most:
                most, largest = now, dict(alive)
        found: dict[Held, int] = {}
        for number, size in largest.items():
            found[self.held(number)] = found.get(self.held(number), 0) + size
        return found


def _apply(alive: dict[int, int], number: int, change: int) -> None:
    if change > 0:
        alive[number] = change
    else:
        alive.pop(number, None)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _traced(func: Any, args: Any, out: Any, moved: int, flops: int) -> TracedOperation:
    name = func.__name__.partition(".")[0]
    if "attention" in name:
        if name.endswith("backward") and not flops:
            # After the gradient come query, key and value; backward has five products where forward has two.
            shapes = (one.shape for one in args[1:4])
            flops = int(2.5 * sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]  # untyped in torch
        return TracedOperation("attention_backward" if name.endswith("backward") else "attention", flops, moved, None)
    first = next(_tensors(out), None)
    if not flops or first is None or first.dim() < 2 or isinstance(out, tuple):
        return TracedOperation(name, flops, moved, None)
    count, rows, columns = 1, first.shape[0], first.shape[-1]
    if first.dim() == 3:
        count, rows = first.shape[0], first.shape[1]
    elif first.dim() > 3:  # a convolution: channels are columns, all places of all samples rows
        columns = first.shape[1]
        rows = first.numel() // columns
    length = max(1, flops // (2 * count * rows * columns))
    return TracedOperation(name, flops, moved, (count, rows, columns, length))


def _is_fused_loss(func: Any) -> bool:
    return bool(str(func) == "torsh.linear_cross_entropy.default")


def _products_of(loss: TracedLoss) -> list[TracedOperation]:
    """The work of a fused loss: logits, both gradients, and what turns logits into their gradients."""
    tokens, classes, width, itemsize, _ = loss
    flops, logits = 2 * tokens * classes * width, tokens * classes * itemsize
    shapes = ((tokens, classes, width), (tokens, width, classes), (classes, width, tokens))
    products = [TracedOperation("mm", flops, logits, (1, *shape)) for shape in shapes]
    return [*products, TracedOperation("_log_softmax", 0, 2 * logits, None)]


def _is_in_place(func: Any) -> bool:
    name = func.__name__.partition(".")[0]
    return bool(name.endswith("_") and not name.endswith("__"))


def follow_split_layers(
    trace: OperationTrace, modules: Iterable[tuple[nn.Module, Literal["columns", "rows", "inside"]]]
) -> Callable[[], None]:
    """Mark what enters and leaves the layers that tensor parallelism splits; returns what removes the hooks."""

    def entered(kind: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if kind == "columns":
            for leaf in _tensors((args, kwargs)):
                trace.held_as.setdefault(trace.number(leaf), Held.GATHERED)
        elif kind == "inside":
            # Experts split by features: everything between their input and output is a part.
            trace.mark((args, kwargs), Held.SPLIT)

    def left(kind: str, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        trace.mark(out, Held.SPLIT if kind == "columns" else Held.HIDDEN)
        if kind == "inside":
            trace.mark((args, kwargs), Held.GATHERED)

    handles = []
    for module, kind in modules:
        handles.append(module.register_forward_pre_hook(partial(entered, kind), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(left, kind), with_kwargs=True))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
