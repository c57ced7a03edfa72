"""Answers say the same on all ranks, whether operations travel as numbers or in full."""

from __future__ import annotations

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torsh_distributed.migrate.horovod.negotiation.answers.agreed_answers import (
    AnswerReader,
    AnswerWriter,
    ReusedBuffer,
    fuse,
)
from torsh_distributed.migrate.horovod.negotiation.answers.request_table import (
    NumberGiver,
    ReadyOp,
    RequestNumbers,
    RequestTable,
)
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request, RequestFlags, request_from_wire


def ask(name: str, numel: int = 4) -> Request:
    return Request(name, OpKind.ALLREDUCE, (("float32", (numel,)),), "Sum")


def over_the_wire(value: object) -> object:
    return msgpack.unpackb(msgpack.packb(value), use_list=False)


@given(
    st.integers(0, 4),
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([4, 8])), min_size=1, unique_by=lambda p: p[0])
    ),
)
def test_both_ranks_run_the_same_steps_round_after_round(capacity: int, rounds: list[list[tuple[str, int]]]) -> None:
    giver, numbers = NumberGiver(capacity, 2), RequestNumbers()
    table = RequestTable(2, giver)
    writer, reader = AnswerWriter(table, giver, threshold_bytes=40), AnswerReader(numbers)
    seen = 0
    for wanted in rounds:
        for rank, known in ((0, giver), (1, numbers)):
            asked = [known.number_of(ask(*one)) for one in wanted]
            message = [ask(*one) if number is None else number for one, number in zip(wanted, asked, strict=True)]
            if rank:
                message = [one if isinstance(one, int) else request_from_wire(one) for one in over_the_wire(message)]
                giver.has_seen(1, seen)
            table.add_all(rank, message)
        answer = writer.next_answer()
        assert answer is not None
        seen = answer.number
        steps = reader.read(over_the_wire(answer.message), answer.withdrawn)
        assert steps == answer.steps
        assert sorted(one.request for step in steps for one in step) == sorted(ask(*one) for one in wanted)
        assert writer.next_answer() is None


def test_a_repeated_burst_is_the_same_object_again() -> None:
    giver, numbers = NumberGiver(10, 1), RequestNumbers()
    table = RequestTable(1, giver)
    writer, reader = AnswerWriter(table, giver, threshold_bytes=1000), AnswerReader(numbers)
    found = []
    for _ in range(3):
        asked = [giver.number_of(ask(name)) for name in "abc"]
        table.add_all(0, [ask(name) if number is None else number for name, number in zip("abc", asked, strict=True)])
        answer = writer.next_answer()
        assert answer is not None
        found.append((answer.steps[0], reader.read(over_the_wire(answer.message), answer.withdrawn)[0]))
    assert not found[0][0].is_repeated
    assert found[1][0] is found[2][0]
    assert found[1][1] is found[2][1]
    assert found[1][0].is_repeated
    assert found[1][1].is_repeated


KINDS = st.sampled_from([("allreduce", "Sum"), ("allreduce", "Max"), ("allgather", ""), ("broadcast", "")])


@given(
    st.lists(st.tuples(KINDS, st.sampled_from(["float32", "int64"]), st.integers(0, 40)), max_size=20),
    st.integers(0, 400),
)
def test_steps_hold_every_operation_once_and_fit(wanted: list, threshold: int) -> None:
    ready = [
        ReadyOp(Request(f"op{index}", kind, ((dtype, (numel,)),), op))
        for index, ((kind, op), dtype, numel) in enumerate(wanted)
    ]
    steps = fuse(ready, threshold)
    assert sorted(one.request.name for step in steps for one in step) == sorted(one.request.name for one in ready)
    for step in steps:
        if len(step) > 1:
            assert {one.request.kind for one in step} == {OpKind.ALLREDUCE}
            assert len({(one.request.op, one.request.tensors[0][0]) for one in step}) == 1
            assert sum(one.request.num_bytes for one in step) <= threshold


def test_errors_shared_buffers_and_mixed_groups_run_alone() -> None:
    plain = Request("a", OpKind.ALLREDUCE, (("float32", (4,)),), "Sum")
    ready = [
        ReadyOp(plain),
        ReadyOp(plain._replace(name="b"), error="no"),
        ReadyOp(plain._replace(name="c", flags=int(RequestFlags.SHARED))),
        ReadyOp(plain._replace(name="d", tensors=(("float32", (4,)), ("int32", (4,))))),
        ReadyOp(plain._replace(name="e")),
    ]
    assert [[one.request.name for one in step] for step in fuse(ready, 1000)] == [["a", "e"], ["b"], ["c"], ["d"]]


SHAPES = [(), (3,), (2, 2), (0,), (5,)]


def made(start: float, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full(shape, start + index).to(dtype) for index, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values_come_back_changed_whichever_tensors_come(dtype: torch.dtype) -> None:
    mine = made(1, dtype)
    buffer = ReusedBuffer(mine)
    for round_ in range(5):
        tensors = made(7, dtype) if round_ == 3 else mine
        if round_ == 4:
            tensors[1].set_(torch.full((3,), 50.0).to(dtype))  # the same object, other memory
        before = [tensor.clone() for tensor in tensors]
        versions = [tensor._version for tensor in tensors]
        buffer.pack(tensors)
        assert torch.equal(buffer.values, torch.cat([tensor.reshape(-1) for tensor in before]))
        buffer.values.mul_(2)
        buffer.unpack(tensors)
        for tensor, old, version in zip(tensors, before, versions, strict=True):
            assert torch.equal(tensor, old * 2)
            assert tensor._version > version
