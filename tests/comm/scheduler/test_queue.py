"""The rules of order, without threads: streams keep theirs, the oldest never starves, ranks never wait in a circle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.scheduler.queue import AnyTask, Priority, ScheduledWork, TaskQueue

NEVER = float("inf")


def task(
    group: str = "world",
    *,
    num_bytes: int = 1,
    priority: Priority = Priority.NORMAL,
    peer: int | None = None,
    tag: int = 0,
    op: str = "all_reduce",
    submitted_s: float = 0.0,
    deadline_s: float = NEVER,
) -> AnyTask:
    return ScheduledWork(
        op=op,
        call=lambda: None,
        group=group,
        peer=peer,
        tag=tag,
        num_bytes=num_bytes,
        priority=priority,
        submitted_s=submitted_s,
        deadline_s=deadline_s,
    )


def queue_of(*tasks: AnyTask, max_running: int = 4) -> TaskQueue:
    queue = TaskQueue(max_running=max_running)
    for one in tasks:
        queue.add(one)
    return queue


def drain(queue: TaskQueue) -> list[AnyTask]:
    """The order in which tasks run if each ends before the next starts."""
    order = []
    while (chosen := queue.choose()) is not None:
        queue.start(chosen, 0.0)
        queue.running.remove(chosen)
        order.append(chosen)
    return order


def test_equals_keep_the_order_of_submission() -> None:
    tasks = [task("a"), task("b"), task("a")]
    assert drain(queue_of(*tasks)) == tasks


def test_the_most_urgent_goes_first_then_the_oldest() -> None:
    low, first, second, high = (
        task("a", priority=Priority.LOW),
        task("b"),
        task("c"),
        task("d", priority=Priority.CRITICAL),
    )
    assert drain(queue_of(low, first, second, high)) == [high, first, second, low]


def test_collectives_of_one_group_keep_their_order_whatever_their_priority() -> None:
    first, urgent = task("a", num_bytes=100), task("a", num_bytes=1, priority=Priority.CRITICAL)
    queue = queue_of(first, urgent)
    assert queue.choose() is first
    queue.start(first, 0.0)
    assert queue.choose() is None, "the second waits for the first to end"
    queue.running.remove(first)
    assert queue.choose() is urgent


def test_messages_to_other_peers_or_under_other_tags_overtake() -> None:
    blocked = [task(op="send", peer=1, tag=0), task(op="send", peer=1, tag=0)]
    free = [task(op="send", peer=2), task(op="send", peer=1, tag=7), task(op="recv", peer=1, tag=0)]
    queue = queue_of(*blocked, *free, max_running=9)
    started = []
    while (chosen := queue.choose()) is not None:
        queue.start(chosen, 0.0)
        started.append(chosen)
    assert started == [blocked[0], *free]


def test_the_last_slot_is_kept_for_the_oldest() -> None:
    oldest, urgent, more = task("a"), task("b", priority=Priority.HIGH), task("c", priority=Priority.HIGH)
    queue = queue_of(oldest, urgent, more, max_running=2)
    queue.start(urgent, 0.0)
    assert queue.choose() is oldest
    queue.start(oldest, 0.0)
    assert queue.choose() is None
    queue.running.remove(urgent)
    assert queue.choose() is more


def test_what_is_late_takes_its_stream_with_it() -> None:
    late, behind, other = task("a", deadline_s=1.0), task("a"), task("b")
    queue = queue_of(late, behind, other)
    assert queue.expire(0.9) == []
    assert queue.expire(1.0) == [late, behind]
    assert queue.lost_streams == {"a"}
    assert queue.choose() is other


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int, list[int]]:
    """Collectives over random groups, in the order in which a program calls them; each rank submits its own."""
    num_ranks = draw(st.integers(min_value=2, max_value=5))
    members = st.sets(st.integers(min_value=0, max_value=num_ranks - 1), min_size=1).map(
        lambda ranks: tuple(sorted(ranks))
    )
    program = draw(st.lists(members, min_size=1, max_size=25))
    picks = draw(st.lists(st.integers(min_value=0, max_value=3), min_size=25, max_size=25))
    return program, num_ranks, picks


@given(case=programs(), max_running=st.integers(min_value=1, max_value=3))
def test_ranks_that_reorder_freely_never_wait_in_a_circle(
    case: tuple[list[tuple[int, ...]], int, list[int]], max_running: int
) -> None:
    """Every rank has a queue of its own and priorities of its own; a collective ends when all its members run it."""
    program, num_ranks, priorities = case
    queues = [queue_of(max_running=max_running) for _ in range(num_ranks)]
    numbers: dict[int, int] = {}
    for number, ranks in enumerate(program):
        for rank in ranks:
            urgency = Priority((priorities[number] + rank) % 4)  # disagreeing on purpose
            one = task(str(ranks), priority=urgency, num_bytes=1 + (number * 7 + rank) % 5)
            queues[rank].add(one)
            numbers[id(one)] = number
    ended: set[int] = set()
    while len(ended) < len(program):
        for queue in queues:
            while (chosen := queue.choose()) is not None:
                queue.start(chosen, 0.0)
        running = [{numbers[id(one)]: one for one in queue.running} for queue in queues]
        complete = [
            number
            for number, ranks in enumerate(program)
            if number not in ended and all(number in running[rank] for rank in ranks)
        ]
        assert complete, "the ranks wait for each other"
        for number in complete:
            for rank in program[number]:
                queues[rank].running.remove(running[rank][number])
        ended.update(complete)
