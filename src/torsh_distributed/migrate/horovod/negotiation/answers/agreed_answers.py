"""Answers: the operations that all ranks want, packed and in the order they run, as messages and back; pure.

In a message an operation is its number, or everything about it with the number that it gets. Ranks that do the same at
every step bring the same numbers together, so what those become is kept.

The buffer of small tensors in host memory that are reduced together again and again.
Making views of a buffer takes longer than sending small tensors, so they stay with it. Copying them one by one through
torch does too. Scripts often bring the very same tensors every time: those are copied as bytes, at a tenth of the time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_distributed.migrate.horovod.negotiation.answers.request_table import (
    NumberGiver,
    ReadyOp,
    RequestNumbers,
    RequestTable,
)
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, RequestFlags, request_from_wire
from torsh_distributed.parallel.torch_internals import _flatten_dense_tensors, _foreach_copy_, _unflatten_dense_tensors


class ReusedBuffer:
    """One buffer for tensors of these shapes. Only for contiguous tensors on a CPU, without autograd."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.values: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]  # untyped in torch
        self._views = _unflatten_dense_tensors(self.values, tensors)  # type: ignore[no-untyped-call]  # untyped in torch
        self._last: list[Tensor] = []
        self._bytes: list[tuple[memoryview, memoryview]] = []
        """Of the tensors that came last: their part of the buffer, and their own memory."""
        self._addresses: list[int] = []

    def pack(self, tensors: list[Tensor]) -> None:
        """Copy the tensors into the buffer."""
        if self._is_known(tensors):
            for inside, outside in self._bytes:
                inside[:] = outside
        else:
            _foreach_copy_(self._views, tensors)

    def unpack(self, tensors: list[Tensor]) -> None:
        """Copy the buffer into the tensors that were packed last."""
        if self._bytes:
            for inside, outside in self._bytes:
                outside[:] = inside
            torch.autograd.graph.increment_version(tensors)
        else:
            _foreach_copy_(tensors, self._views)

    def _is_known(self, tensors: list[Tensor]) -> bool:
        """Whether these tensors came the last time, and are still where they were."""
        is_same = len(tensors) == len(self._last) and all(map(operator.is_, tensors, self._last))
        if is_same and not self._bytes:
            self._bytes = [(_memory(view), _memory(tensor)) for view, tensor in zip(self._views, tensors, strict=True)]
            self._addresses = [tensor.data_ptr() for tensor in tensors]
            return True
        if is_same and [tensor.data_ptr() for tensor in tensors] == self._addresses:
            return True
        self._last, self._bytes = tensors, []
        return False


def _memory(tensor: Tensor) -> memoryview:
    found: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return found


_SHARED = int(RequestFlags.SHARED)


class PackedStep(list[ReadyOp]):
    """Operations that run as one, all-reduces in one buffer."""

    is_repeated = False
    """Whether the same object comes again when ranks repeat the operations."""
    buffer: ReusedBuffer | None = None
    """Where a repeated step packs its tensors, once it has run."""

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of its operations."""
        return [one.request.name for one in self]


def fuse(ready: Sequence[ReadyOp], threshold_bytes: int) -> list[PackedStep]:
    """The operations in the order they run; those of one step are packed into one buffer.

    An operation joins the open buffer of its kind if it fits; the place of a buffer is that of its first operation.
    """
    steps: list[PackedStep] = []
    open_steps: dict[Hashable, tuple[PackedStep, int]] = {}
    for one in ready:
        key = _fusion_key(one)
        if key is None:
            steps.append(PackedStep([one]))
            continue
        size = one.request.num_bytes
        step, used = open_steps.get(key, (None, 0))
        if step is None or used + size > threshold_bytes:
            step, used = PackedStep(), 0
            steps.append(step)
        step.append(one)
        open_steps[key] = (step, used + size)
    return steps


def _fusion_key(one: ReadyOp) -> Hashable:
    """What operations in one buffer have in common; None for one that runs alone."""
    request = one.request
    if one.error or request.kind != OpKind.ALLREDUCE or request.flags & _SHARED:
        return None
    dtype = request.tensors[0][0]
    if len(request.tensors) > 1 and any(other != dtype for other, _ in request.tensors):
        return None
    return dtype, request.op, request.prescale, request.postscale, request.device, one.joined


_UNNAMED = ".noname."
_CACHED = frozenset({OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCESCATTER, OpKind.ADASUM, OpKind.AVERAGED})
"""Operations whose requests are equal on all ranks, so a number says everything."""
_MAX_KEPT = 64
"""Steps that are kept; each may have a buffer."""


class AgreedAnswer(NamedTuple):
    """What all ranks do next."""

    number: int
    """Counts the answers of a set from 1."""
    steps: list[PackedStep]
    message: Sequence[Any]
    """The steps as the other ranks get them."""
    withdrawn: list[int]
    """Numbers that stand for nothing after this answer."""


class AnswerWriter:
    """On the first rank of a set: makes answers of what is ready in its table."""

    def __init__(self, table: RequestTable, numbers: NumberGiver, *, threshold_bytes: int) -> None:
        self._table, self._numbers, self._threshold_bytes = table, numbers, threshold_bytes
        self._num_answers = 0
        self._kept: dict[tuple[int, ...], tuple[list[PackedStep], Sequence[Any]]] = {}

    def next_answer(self) -> AgreedAnswer | None:
        """What became ready since the last one; None if nothing did."""
        numbers, ready = self._table.take_numbers(), self._table.take_ready()
        if not numbers and not ready:
            return None
        self._num_answers += 1
        self._numbers.use(numbers)
        withdrawn: list[int] = []
        if ready:
            steps = fuse([*map(self._repeated, numbers), *ready], self._threshold_bytes)
            message: Sequence[Any] = [[self._encoded(one, withdrawn) for one in step] for step in steps]
        else:
            steps, message = self._repeated_steps(numbers)
        self._numbers.has_seen(0, self._num_answers)
        if withdrawn:
            self._kept.clear()
            self._table.withdraw(withdrawn)
        return AgreedAnswer(self._num_answers, steps, message, withdrawn)

    def _repeated(self, number: int) -> ReadyOp:
        return ReadyOp(self._numbers.request_of(number))

    def _repeated_steps(self, numbers: tuple[int, ...]) -> tuple[list[PackedStep], Sequence[Any]]:
        kept = self._kept.get(numbers)
        if kept is None:
            steps = fuse([self._repeated(number) for number in numbers], self._threshold_bytes)
            for step in steps:
                step.is_repeated = True
            message = [[self._numbers.number_of(one.request) for one in step] for step in steps]
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            kept = self._kept[numbers] = steps, message
        return kept

    def _encoded(self, one: ReadyOp, withdrawn: list[int]) -> Any:
        """A ready operation as it travels: a number, or everything with the number it gets now."""
        request = one.request
        is_plain = not one.error and not one.joined
        number = self._numbers.number_of(request)
        if number is not None and is_plain:
            self._numbers.use((number,))
            return number
        given: int | None = None
        if is_plain and request.kind in _CACHED and _UNNAMED not in request.name:
            given, gone = self._numbers.give(request, self._num_answers)
            withdrawn += gone
        return (given, request, one.error, one.sizes, one.joined)


class AnswerReader:
    """On the other ranks: makes steps of the messages, and learns the numbers in them."""

    def __init__(self, numbers: RequestNumbers) -> None:
        self._numbers = numbers
        self._kept: dict[tuple[int, ...], PackedStep] = {}

    def read(self, message: Sequence[tuple[Any, ...]], withdrawn: Sequence[int]) -> list[PackedStep]:
        """The steps in a message."""
        steps = [self._step(one) for one in message]
        if withdrawn:
            self._kept.clear()
            for number in withdrawn:
                self._numbers.forget(number)
        return steps

    def _step(self, message: tuple[Any, ...]) -> PackedStep:
        is_repeated = type(message[0]) is int and len(message) > 1
        kept = self._kept.get(message) if is_repeated else None
        if kept is None:
            kept = PackedStep(self._decoded(one) for one in message)
            if is_repeated and all(type(one) is int for one in message):
                if len(self._kept) >= _MAX_KEPT:
                    self._kept.clear()
                kept.is_repeated = True
                self._kept[message] = kept
        return kept

    def _decoded(self, one: Any) -> ReadyOp:
        if type(one) is int:
            return ReadyOp(self._numbers.request_of(one))
        number, parts, error, sizes, joined = one
        request = request_from_wire(parts)
        if number is not None:
            self._numbers.learn(number, request)
        return ReadyOp(request, error, sizes, joined)
