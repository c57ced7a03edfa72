"""Ranks that die, stop, leave or disagree, and aborts: a clear error on every living rank, and soon."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.chaos import test_backend_faults as faults
from tests.chaos import test_backend_lifecycle as lifecycle
from tests.comm.backends import test_point_to_point as messages
from tests.comm.backends.mpi.world import MpiWorld
from torsh_distributed.comm.backends.mpi import MpiWire
from torsh_distributed.comm.backends.mpi.library import library
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout, TensorShapeMismatch

pytestmark = [pytest.mark.needs_mpi, pytest.mark.ranks]


def the_wire() -> MpiWire:
    wire = faults.the_group().wire
    assert isinstance(wire, MpiWire)
    return wire


# ---- absence ----------------------------------------------------------------------------------------------------


def be_stopped_before_barrier() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    limit = 2.0 if dist.get_rank() == 0 else 20.0  # the third rank is released by the first one's giving up
    dist.barrier(timeout=timedelta(seconds=limit))


@pytest.mark.matrix
def test_a_stopped_rank_is_missing_at_the_deadline(mpi_world: MpiWorld) -> None:
    outcomes = mpi_world.outcomes(be_stopped_before_barrier, num_ranks=3, timeout_s=15)
    first, third = outcomes[0].error, outcomes[2].error
    assert isinstance(first, OperationTimeout)
    assert first.context["missing_ranks"] == [1]
    assert "barrier number 2 was not done within 2 s; missing: rank 1" in str(first)
    assert isinstance(third, CommunicationError)
    assert "rank 0 ended the group: barrier number 2 was not done" in str(third)


def be_killed_before_all_reduce() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1_000_000), async_op=False)


def test_a_killed_rank_is_missing_at_the_deadline(mpi_world: MpiWorld) -> None:
    """A launcher that ends the job at once is the rule (mpiexec, torsh run); here nobody does."""
    outcomes = mpi_world.outcomes(be_killed_before_all_reduce, num_ranks=3, group_timeout_s=4)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, CommunicationError)
    assert any(isinstance(outcomes[rank].error, OperationTimeout) for rank in (0, 2))


def test_a_rank_that_left_is_named(mpi_world: MpiWorld) -> None:
    outcomes = mpi_world.outcomes(faults.one_leaves_early)
    assert isinstance(outcomes[0].error, CommunicationError)
    assert "rank 1 left the group while this rank still needed it" in str(outcomes[0].error)
    assert outcomes[1].is_ok


def leave_instead_of_sending() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(torch.ones(4), 1)


def test_a_receive_from_a_rank_that_left_fails(mpi_world: MpiWorld) -> None:
    outcomes = mpi_world.outcomes(leave_instead_of_sending)
    assert "rank 1 left the group" in str(outcomes[0].error)
    assert outcomes[1].is_ok


def send_and_leave() -> float:
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        return 0.0
    control = the_wire()._control
    while control.gone_for(0, 0.0) is None:
        control.look()
        time.sleep(0.01)
    got = torch.zeros(4)
    dist.recv(got, 0)
    return got.sum().item()


def test_what_was_sent_before_leaving_still_arrives(mpi_world: MpiWorld) -> None:
    assert mpi_world.run(send_and_leave) == [0.0, 4.0]


def test_a_receive_nobody_serves_ends_at_the_deadline(mpi_world: MpiWorld) -> None:
    outcomes = mpi_world.outcomes(messages.nobody_sends, group_timeout_s=4)
    assert isinstance(outcomes[1].error, OperationTimeout)
    assert outcomes[1].error.context["missing_ranks"] == [0]
    assert "recv number 1" in str(outcomes[1].error)
    assert "rank 1 ended the group" in str(outcomes[0].error), "rank 0 does not wait for its own deadline"


# ---- disagreement -------------------------------------------------------------------------------------------------


def test_a_message_of_another_size_is_an_error_with_both_sizes(mpi_world: MpiWorld) -> None:
    outcomes = mpi_world.outcomes(messages.wrong_size)
    assert isinstance(outcomes[1].error, TensorShapeMismatch)
    assert "rank 0 sent 12 bytes, and the tensor that receives them has 16" in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, CommunicationError)


def receive_too_little() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(8), 1)
        dist.barrier()
    else:
        dist.recv(torch.ones(4), 0)


def test_a_message_larger_than_its_tensor_is_an_error(mpi_world: MpiWorld) -> None:
    outcomes = mpi_world.outcomes(receive_too_little)
    assert isinstance(outcomes[1].error, TensorShapeMismatch)
    assert isinstance(outcomes[0].error, CommunicationError)


def test_splits_that_do_not_fit_are_an_error(mpi_world: MpiWorld) -> None:
    outcomes = mpi_world.outcomes(faults.disagree, "splits")
    assert isinstance(outcomes[0].error, TensorShapeMismatch)
    assert "rank 1 sent 4 bytes, and the tensor that receives them has 8" in str(outcomes[0].error)


def test_misuse_is_refused_before_anything_is_sent(mpi_world: MpiWorld) -> None:
    mpi_world.run(faults.misuse)


def use_a_tag_too_large() -> None:
    with pytest.raises(InvalidArgument, match="a tag must lie between 0 and"):
        dist.send(torch.ones(1), 1 - dist.get_rank(), tag=library().max_tag)
    dist.barrier()


def test_tags_that_mpi_has_no_room_for_are_refused(mpi_world: MpiWorld) -> None:
    mpi_world.run(use_a_tag_too_large)


# ---- abort --------------------------------------------------------------------------------------------------------


def come_after_the_abort(reason: str) -> float:
    """A rank that was elsewhere: what the other had sent before it gave up still counts, what comes after does not."""
    time.sleep(0.6)
    with pytest.raises(CommunicationError, match=reason):
        for _ in range(2):
            dist.barrier()
    return 0.0


def abort_while_blocked(name: str) -> float:
    if dist.get_rank() == 1:
        return come_after_the_abort("rank 0 ended the group: the test wants it")
    group = faults.the_group()
    aborted_at: list[float] = []

    def abort() -> None:
        aborted_at.append(time.monotonic())
        group.abort("the test wants it")

    timer = threading.Timer(0.3, abort)
    timer.start()
    with pytest.raises(CommunicationError, match="this rank ended the group: the test wants it"):
        lifecycle.BLOCKED[name]()
    delay_s = time.monotonic() - aborted_at[0]
    timer.join()
    for call in (dist.barrier, lambda: dist.send(torch.ones(1), 1)):
        with pytest.raises(CommunicationError, match="the group was aborted: the test wants it"):
            call()
    return delay_s


@pytest.mark.parametrize("name", lifecycle.BLOCKED)
def test_abort_releases_a_blocked_call(mpi_world: MpiWorld, name: str) -> None:
    delays = [mpi_world.run(abort_while_blocked, name)[0] for _ in range(2)]
    # The promise is 50 ms on a machine that has time; on a busy one the fastest of a few tells more than the slowest.
    assert min(delays) < 0.5


def interrupt_while_blocked() -> str:
    if dist.get_rank() == 1:
        come_after_the_abort("rank 0 ended the group")
        return "told"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.barrier()
    return "interrupted"


def test_control_c_ends_a_blocked_call(mpi_world: MpiWorld) -> None:
    assert mpi_world.run(interrupt_while_blocked) == ["interrupted", "told"]


def go_on_with_the_survivors(folder: Path) -> tuple[int, float] | None:
    """Rank 1 is lost to the others; they make a new world of themselves, in which rank 2 is rank 1."""
    rank = dist.get_rank()
    if rank == 1:
        return None
    faults.the_group().abort("rank 1 is lost")
    dist.destroy_process_group()
    new_rank = [0, 2].index(rank)
    dist.init_process_group(
        "mpi4py",
        store=dist.FileStore(str(folder / "survivors"), 2),
        rank=new_rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    tensor = torch.tensor([10.0 + rank])
    dist.all_reduce(tensor)
    pair = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=pair)
    return new_rank, tensor.item()


def test_survivors_make_a_new_world(mpi_world: MpiWorld, tmp_path: Path) -> None:
    assert mpi_world.run(go_on_with_the_survivors, tmp_path, num_ranks=3) == [(0, 44.0), None, (1, 44.0)]


# ---- the process --------------------------------------------------------------------------------------------------


def test_a_forked_child_may_not_use_the_group(mpi_world: MpiWorld) -> None:
    assert mpi_world.run(lifecycle.use_in_a_child) == ["ok", "ok"]


def test_waiting_does_not_burn_a_core(mpi_world: MpiWorld) -> None:
    burnt = mpi_world.run(lifecycle.wait_idly, 1.0, num_ranks=4)
    assert max(burnt) < 0.3


def make_and_leave_groups() -> tuple[tuple[int, int], tuple[int, int]]:
    """What this process holds before and after a group that was used in every way."""

    def once() -> None:
        group = dist.new_group([0, 1])
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group, async_op=True).wait()  # type: ignore[union-attr]
        peer = 1 - dist.get_rank()
        requests = [
            dist.isend(torch.ones(500_000), peer, group=group),
            dist.irecv(torch.ones(500_000), peer, group=group),
        ]
        for request in requests:
            assert request is not None
            request.wait()
        dist.destroy_process_group(group)
        dist.barrier()

    def holdings() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    once()
    before = holdings()
    for _ in range(20):
        once()
    return before, holdings()


def test_a_group_gives_back_all_it_took(mpi_world: MpiWorld) -> None:
    for before, after in mpi_world.run(make_and_leave_groups):
        assert after == before


def find_segments() -> list[str]:
    dist.barrier()
    return [path.name for path in Path("/dev/shm").iterdir() if str(path) in Path("/proc/self/maps").read_text()]


def test_mpi_leaves_no_names_of_shared_memory(mpi_world: MpiWorld) -> None:
    assert mpi_world.run(find_segments) == [[], []]
