"""The likely cause of a wait, from what the missing rank shows."""

from __future__ import annotations

import dataclasses

import pytest

from torsh_distributed.launch.causes.diagnosis import diagnose
from torsh_distributed.launch.causes.likely_cause import likely_cause
from torsh_distributed.launch.causes.waits import explain_waits
from torsh_distributed.launch.worker.rank_status import GroupHistory, RankStatus, SeenOperation, WaitingCall


def history(*operations: tuple[str, int, str | None]) -> dict[str, GroupHistory]:
    seen = tuple(
        SeenOperation(sequence=number, op=op, num_bytes=size, at=at)
        for number, (op, size, at) in enumerate(operations, 1)
    )
    return {"0": GroupHistory(members=(0, 1), operations=seen)}


STEP = (("all_reduce", 4000, "train.py:10"), ("all_reduce", 4, "train.py:11"))


def waiting(rank: int, *, sequence: int = 5, age_s: float = 9.0, at: str = "train.py:10 in step") -> RankStatus:
    call = WaitingCall(
        op="all_reduce", group="0", sequence=sequence, num_bytes=4000, members=(0, 1), age_s=age_s, at=at
    )
    return RankStatus(rank=rank, waiting=call, groups=history(*STEP, *STEP, STEP[0]), stack=("  File …",))


def cause_of(other: RankStatus, finished: set[int] | None = None) -> str:
    statuses = {0: waiting(0), 1: other}
    found = explain_waits(statuses, finished or set())
    assert found is not None
    assert found.rank == 1
    return likely_cause(found, statuses, finished or set()).kind


def late(*stack: str, **others: object) -> RankStatus:
    return RankStatus(rank=1, groups=history(*STEP, *STEP), stack=stack, **others)  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        (('  File "train.py", line 70, in finish', "    torch.save(model.state_dict(), path)"), "save"),
        (('  File "train.py", line 70, in save_weights', "    file.write(data)"), "save"),
        (('  File "train.py", line 9, in <module>', "    batch = next(loader)"), "input"),
        (
            ('  File "train.py", line 9, in f', "    x = q.get()", "  … 2 frames in torch, to dataloader.py:1 in get"),
            "input",
        ),
        (('  File "train.py", line 9, in f', "  … 2 frames in Python, to threading.py:320 in wait"), "lock"),
        (('  File "train.py", line 9, in f', "  … 4 frames in Python, to socket.py:7 in recv_into"), "outside"),
        (('  File "train.py", line 9, in f', "    breakpoint()"), "debugger"),
        (('  File "train.py", line 9, in f', "    time.sleep(60)"), "sleep"),
        (('  File "train.py", line 9, in f', "    total += values[at]"), "unknown"),
    ],
)
def test_the_stack_of_the_missing_rank_tells(stack: tuple[str, ...], kind: str) -> None:
    assert cause_of(late(*stack)) == kind


def test_what_the_kernel_and_the_interpreter_say_comes_before_the_stack() -> None:
    stack = ('  File "train.py", line 70, in finish', "    torch.save(model.state_dict(), path)")
    assert cause_of(late(*stack, silence="it does not answer: it is stopped (SIGSTOP or a debugger)")) == "stopped"
    gil = "it does not answer: it waits in native code that holds Python's lock"
    assert cause_of(late("  File …", "    re.match(pattern, text)", silence=gil)) == "native"
    assert cause_of(late(*stack, silence=gil)) == "save", "its stack shows what it does there"
    assert cause_of(late(*stack, silence="it does not answer: it is in uninterruptible sleep: a disk")) == "storage"
    assert cause_of(late(*stack, handling="ValueError: bad (train.py:3)")) == "exception"
    assert cause_of(late('  File "a.py", line 1, in f', "    pass", native="runs, 99% CPU")) == "compute"
    assert cause_of(late(*stack), finished={1}) == "ended"


@pytest.mark.parametrize(
    ("fifth", "kind"),
    [
        (("all_reduce", 4, "train.py:11"), "skipped"),
        (("all_reduce", 2000, "train.py:10"), "shape"),
        (("barrier", 0, "train.py:55"), "branch"),
    ],
)
def test_a_rank_that_calls_something_else_has_skipped_branched_or_another_shape(
    fifth: tuple[str, int, str], kind: str
) -> None:
    assert cause_of(RankStatus(rank=1, groups=history(*STEP, *STEP, fifth))) == kind


def test_a_rank_that_died_in_the_call_took_its_size_along() -> None:
    died = RankStatus(rank=1, groups=history(*STEP, *STEP, ("all_reduce", -1, "train.py:11")))
    assert cause_of(died) == "skipped", "it was on another line than the others"
    unknown = tuple((op, num_bytes, None) for op, num_bytes, _ in (*STEP, *STEP, STEP[0]))
    others = RankStatus(rank=0, waiting=waiting(0).waiting, groups=history(*unknown))
    statuses = {0: others, 1: died}
    found = explain_waits(statuses, set())
    assert found is not None
    cause = likely_cause(found, statuses, set())
    assert cause.kind == "shape", "without their line, both are possible"
    assert "or it skipped one" in cause.text


def test_a_barrier_inside_a_save_is_a_save_on_one_rank() -> None:
    other = RankStatus(
        rank=1,
        groups=history(*STEP, *STEP, ("barrier", 0, "train.py:55")),
        stack=('  File "train.py", line 55, in save_checkpoint', "    dist.barrier()"),
    )
    assert cause_of(other) == "save"


def test_the_paragraph_says_who_where_and_why() -> None:
    other = late('  File "train.py", line 70, in finish', "    torch.save(model.state_dict(), path)")
    found = diagnose({0: waiting(0), 1: other}, set(), num_ranks=2)
    assert found.is_stuck
    assert found.text.startswith(
        "Rank 0 has waited 9.0 s in all_reduce #5 (4000 bytes, train.py:10 in step) for rank 1, which is at "
        "train.py:70 in finish; its last operation is all_reduce #4 of 4 bytes at train.py:11. Likely cause: it saves"
    )
    assert (found.rank, found.operation, found.sequence, found.num_bytes) == (1, "all_reduce", 5, 4000)
    assert found.to_dict()["cause"]["kind"] == "save"
    assert len(found.ranks) == 2


def test_a_job_that_runs_is_not_called_stuck() -> None:
    found = diagnose({0: waiting(0, age_s=0.2), 1: late("  File …")}, set(), num_ranks=2)
    assert not found.is_stuck
    assert found.text.startswith("Nothing is stuck")


def test_a_stopped_rank_is_told_although_nobody_waits_yet() -> None:
    other = RankStatus(rank=1, silence="it does not answer: it is stopped (SIGSTOP or a debugger)", pid=42)
    found = diagnose({0: RankStatus(rank=0, stack=("  File …",)), 1: other}, set(), num_ranks=2)
    assert found.is_stuck
    assert found.rank == 1
    assert "kill -CONT 42" in found.text


def test_what_no_machine_acknowledges_is_a_dead_link() -> None:
    cut = dataclasses.replace(waiting(0), native="sleeps in epoll_wait; no answer from 10.0.0.2:4711")
    said = diagnose({0: cut, 1: waiting(1)}, set(), num_ranks=2)
    assert said.cause is not None
    assert (said.cause.kind, said.is_stuck) == ("link", True)
    assert "what rank 0 sent to 10.0.0.2:4711 is not acknowledged" in said.text
    alive = diagnose({0: waiting(0), 1: waiting(1)}, set(), num_ranks=2)
    assert not alive.is_stuck
    # A rank that goes another way is the cause, whatever the network does.
    odd = dataclasses.replace(late(), groups=history(*STEP, *STEP, ("barrier", 0, "train.py:30")))
    assert cause_of(dataclasses.replace(odd, native="runs; no answer from 10.0.0.2:4711")) != "link"
