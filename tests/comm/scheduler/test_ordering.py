"""The strategies: which task goes next when all of them may."""

from __future__ import annotations

import time

import pytest

from tests.comm.scheduler.test_queue import queue_of, task
from torsh_distributed.comm.scheduler.bandwidth import BandwidthMonitor
from torsh_distributed.comm.scheduler.ordering import TaskChooser
from torsh_distributed.comm.scheduler.queue import TaskQueue
from torsh_distributed.comm.scheduler.task import AnyTask, Priority
from torsh_distributed.errors import InvalidArgument


def drain(queue: TaskQueue, now_s: float = 0.0) -> list[AnyTask]:
    """The order in which tasks run if each ends before the next starts."""
    order = []
    while (chosen := queue.choose(now_s)) is not None:
        queue.start(chosen, now_s)
        queue.running.remove(chosen)
        order.append(chosen)
    return order


def test_fifo_keeps_the_order_of_submission() -> None:
    tasks = [task("a"), task("b"), task("a")]
    assert drain(queue_of("fifo", *tasks)) == tasks


def test_priority_takes_the_most_urgent_then_the_oldest() -> None:
    low, first, second, high = (
        task("a", priority=Priority.LOW),
        task("b"),
        task("c"),
        task("d", priority=Priority.CRITICAL),
    )
    assert drain(queue_of("priority", low, first, second, high)) == [high, first, second, low]


def test_shortest_first_takes_the_fewest_bytes() -> None:
    large, small, middle = task("a", num_bytes=100), task("b", num_bytes=1), task("c", num_bytes=10)
    assert drain(queue_of("shortest_first", large, small, middle)) == [small, middle, large]


def test_round_robin_is_fair_across_groups() -> None:
    tasks = [task(group) for group in "aaaabbc"]
    assert [one.group for one in drain(queue_of("round_robin", *tasks))] == list("abcabaa")


def test_adaptive_is_urgent_first_until_something_was_measured() -> None:
    plain, urgent = task("a", num_bytes=1), task("b", num_bytes=10**9, priority=Priority.HIGH)
    assert drain(queue_of("adaptive", plain, urgent)) == [urgent, plain]


def test_adaptive_weighs_time_waited_against_time_needed() -> None:
    monitor = BandwidthMonitor()
    now_s = time.monotonic()
    monitor.add(1000, now_s - 1.0, now_s)  # 1000 bytes per second
    long, short = task("a", num_bytes=100_000), task("b", num_bytes=1000, submitted_s=5.0)
    # 10 s waited for 100 s of work against 5 s for 1 s of work; in the end the long one goes before a fresh short one.
    assert queue_of("adaptive", long, short, monitor=monitor).choose(10.0) is short
    fresh = task("b", num_bytes=1000, submitted_s=1000.0)
    assert queue_of("adaptive", long, fresh, monitor=monitor).choose(1000.1) is long


def test_an_unknown_strategy_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidArgument, match="use one of: fifo, priority, shortest_first, round_robin, adaptive"):
        TaskChooser("random", BandwidthMonitor())
