"""The scheduler with its threads: results, order, limits, cancelling, deadlines, and real ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.collectives.point_to_point import recv, send
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.scheduler import CommunicationScheduler, Priority, ScheduledWork
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout

BACKENDS = ["gloo", "shm"]
LIMIT_S = 20.0


class Gate:
    """An operation that runs until it is told to end, and says when it has started."""

    def __init__(self) -> None:
        self.has_started = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_started.set()
        assert self.may_end.wait(LIMIT_S)
        return "opened"


def block(scheduler: CommunicationScheduler, **where: int) -> tuple[Gate, ScheduledWork[str]]:
    gate = Gate()
    work = scheduler.submit("gate", gate, num_bytes=0, **where)
    assert gate.has_started.wait(LIMIT_S)
    return gate, work


def test_a_result_and_an_error_reach_whoever_waits() -> None:
    def fail() -> None:
        raise ValueError("as told")

    with CommunicationScheduler() as scheduler:
        assert scheduler.submit("add", lambda: 1 + 1, num_bytes=0).wait(LIMIT_S) == 2
        failed = scheduler.submit("fail", fail, num_bytes=0)
        for _ in range(2):
            with pytest.raises(ValueError, match="as told"):
                failed.wait(LIMIT_S)
        assert isinstance(failed.exception(), ValueError)
        assert failed.is_completed()
    stats = scheduler.stats()
    assert (stats.num_submitted, stats.num_completed, stats.num_failed) == (2, 1, 1)


def test_a_torch_future_carries_the_result_and_the_error() -> None:
    def fail() -> int:
        raise ValueError("as told")

    with CommunicationScheduler() as scheduler:
        future = scheduler.submit("add", lambda: torch.ones(2), num_bytes=8).get_future()
        assert future.then(lambda done: done.value().sum().item()).wait() == 2.0
        failed = scheduler.submit("fail", fail, num_bytes=0).get_future()
        with pytest.raises(ValueError, match="as told"):
            failed.wait()


def test_at_most_so_many_run_at_a_time() -> None:
    gates = [Gate() for _ in range(5)]
    with CommunicationScheduler(max_concurrent_ops=2) as scheduler:
        works = [scheduler.submit("gate", gate, num_bytes=0, peer=index) for index, gate in enumerate(gates)]
        for index, gate in enumerate(gates):
            assert gate.has_started.wait(LIMIT_S)
            running = [one for one in gates if one.has_started.is_set() and not one.may_end.is_set()]
            assert len(running) <= 2
            assert scheduler.stats().num_running <= 2
            gate.may_end.set()
            works[index].wait(LIMIT_S)


def test_what_does_not_start_in_time_fails_and_takes_its_stream_with_it() -> None:
    with CommunicationScheduler(max_concurrent_ops=1) as scheduler:
        gate, _ = block(scheduler, peer=1)
        late = scheduler.submit("late", lambda: None, num_bytes=0, timeout_s=0.05)
        behind = scheduler.submit("behind", lambda: None, num_bytes=0)
        with pytest.raises(OperationTimeout, match=r"late did not start within 0\.05 s"):
            late.wait(LIMIT_S)
        with pytest.raises(CommunicationError, match="out of step"):
            behind.wait(LIMIT_S)
        with pytest.raises(CommunicationError, match="out of step"):
            scheduler.submit("later", lambda: None, num_bytes=0)
        gate.may_end.set()
    assert scheduler.stats().num_expired == 2


def test_waiting_can_be_given_up_without_ending_the_task() -> None:
    with CommunicationScheduler() as scheduler:
        gate, work = block(scheduler)
        with pytest.raises(OperationTimeout, match="the task goes on"):
            work.wait(0.01)
        gate.may_end.set()
        assert work.wait(LIMIT_S) == "opened"


def test_a_rate_limit_holds() -> None:
    """Twenty times a tenth of the limit's second: at least as long as the limit says, whatever the machine does."""
    num_bytes, rate = 100_000, 4_000_000
    with CommunicationScheduler(rate_limit_bytes_per_s=rate) as scheduler:
        started_s = time.monotonic()
        times: list[float] = []
        for index in range(20):
            scheduler.submit("send", lambda: times.append(time.monotonic()), num_bytes=num_bytes, peer=index)
        scheduler.close()
    burst = 0.05 * rate
    for number, moment_s in enumerate(sorted(times), start=1):
        assert number * num_bytes <= burst + rate * (moment_s - started_s) + 1
    assert scheduler.stats().rate_limit_bytes_per_s == rate


def test_a_rate_limit_can_be_lifted() -> None:
    with CommunicationScheduler(rate_limit_bytes_per_s=1) as scheduler:
        first = scheduler.submit("first", lambda: 1, num_bytes=1000)
        second = scheduler.submit("second", lambda: 2, num_bytes=1000)
        assert first.wait(LIMIT_S) == 1
        assert not second.is_completed()
        scheduler.set_rate_limit(None)
        assert second.wait(LIMIT_S) == 2


def test_closing_waits_and_then_refuses() -> None:
    scheduler = CommunicationScheduler()
    gate, work = block(scheduler)
    with pytest.raises(OperationTimeout, match="1 operations were not over"):
        scheduler.close(timeout_s=0.05)
    gate.may_end.set()
    scheduler.close()
    assert work.is_completed()
    with pytest.raises(CommunicationError, match="the scheduler was closed"):
        scheduler.submit("late", lambda: None, num_bytes=0)


def test_leaving_with_an_error_cancels_what_waits() -> None:
    with pytest.raises(KeyError), CommunicationScheduler(max_concurrent_ops=1) as scheduler:
        gate, _ = block(scheduler)
        waiting = scheduler.submit("never", lambda: pytest.fail("it ran"), num_bytes=0)
        waiting.get_future().add_done_callback(lambda _: gate.may_end.set())
        raise KeyError
    with pytest.raises(CommunicationError, match="never was cancelled before it started"):
        waiting.wait(LIMIT_S)
    assert scheduler.stats().num_cancelled == 1


def test_statistics_count_what_happened() -> None:
    scheduler = CommunicationScheduler()
    before = scheduler.stats()
    assert before.mean_queue_s is before.mean_run_s is before.bytes_per_s is None
    with scheduler:
        for _ in range(3):
            scheduler.submit("op", lambda: None, num_bytes=1000)
    after = scheduler.stats()
    assert (after.num_submitted, after.num_completed, after.num_bytes, after.queue_size) == (3, 3, 3000, 0)
    assert after.mean_queue_s is not None
    assert after.mean_run_s is not None
    assert after.bytes_per_s is not None
    assert after.bytes_per_s > 0


@pytest.mark.parametrize("name", ["max_concurrent_ops", "timeout_s"])
def test_impossible_settings_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be above zero"):
        CommunicationScheduler(**{name: 0})  # type: ignore[arg-type]


def many_collectives(count: int) -> None:
    """Two overlapping groups and messages between them, with urgencies that differ from rank to rank."""
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(size)))]
    works = []
    with CommunicationScheduler(max_concurrent_ops=2) as scheduler:
        for number in range(count):
            group = groups[number % 2]
            if me not in dist.get_process_group_ranks(group):
                continue
            members = dist.get_process_group_ranks(group)
            tensor = torch.full((1000,), float(me + number))
            work = scheduler.submit(
                "all_reduce",
                lambda tensor=tensor, group=group: all_reduce(tensor, group=group),  # type: ignore[misc]
                num_bytes=4000,
                group=group,
                priority=Priority((number + me) % 4),
            )
            works.append((work, sum(members) + number * len(members)))
        outgoing = scheduler.submit(
            "send", lambda: send(torch.tensor([float(me)]), (me + 1) % size), num_bytes=4, peer=(me + 1) % size
        )
        message = torch.zeros(1)
        incoming = scheduler.submit("recv", lambda: recv(message, (me - 1) % size), num_bytes=4, peer=(me - 1) % size)
        for work, expected in works:
            assert work.wait(LIMIT_S).unique().tolist() == [expected]
        outgoing.wait(LIMIT_S)
        assert incoming.wait(LIMIT_S) == (me - 1) % size == message.item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [20, pytest.param(2_000, marks=pytest.mark.matrix)])
def test_real_ranks_with_other_urgencies_do_not_deadlock(world: World, backend: str, count: int) -> None:
    world.run(many_collectives, count, num_ranks=3, backend=backend, timeout_s=60 if count == 20 else 300)


SCRIPT = """
import os, sys, torch
from torsh_distributed.comm.scheduler import CommunicationScheduler

torch.set_num_threads(1)
for is_waited in (True, False) * 2:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status == 0, (is_waited, os.waitstatus_to_exitcode(status))
        continue
    scheduler = CommunicationScheduler(max_concurrent_ops=2)
    for index in range(50):
        scheduler.submit("op", lambda: torch.ones(20000).sum(), num_bytes=1, peer=index % 5)
    if is_waited:
        scheduler.submit("op", lambda: torch.ones(20000).sum(), num_bytes=1, peer=0).wait()
    sys.exit()
"""


@pytest.mark.ranks
def test_a_process_ends_well_with_tasks_under_way() -> None:
    """Threads of a scheduler that was not closed neither delay the end nor crash the process.

    Four processes end as Python ends; forked, so that torch is imported once.
    """
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
