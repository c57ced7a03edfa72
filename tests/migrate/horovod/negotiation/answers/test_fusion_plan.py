"""All-reduces of one kind share a buffer up to the threshold; nothing else does, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.migrate.horovod.negotiation.answers.fusion_plan import fuse
from torsh_distributed.migrate.horovod.negotiation.answers.request_table import ReadyOp
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request, RequestFlags

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
