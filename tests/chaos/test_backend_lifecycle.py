"""How groups come to be and end: aborts, interrupts, failed starts, forks, and what must not be left behind."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.backends.ranks import CORES, barrier_within, errors_of, on_shm, the_group
from tests.lab.network import Lab
from torsh_distributed.errors import (
    BackendError,
    BackendNotInitialized,
    CommunicationError,
    InvalidArgument,
    MemoryAllocationFailed,
    OperationTimeout,
)

pytestmark = pytest.mark.ranks

# ---- abort --------------------------------------------------------------------------------------------------------


BLOCKED: dict[str, Callable[[], object]] = {
    "collective": dist.barrier,
    "receive": lambda: dist.recv(torch.ones(1), 1),
    "asynchronous": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=15)),  # type: ignore[union-attr]
}


def abort_while_blocked(name: str) -> float:
    if dist.get_rank() == 1:
        return _wait_for_the_abort()
    group = the_group()
    aborted_at: list[float] = []

    def abort() -> None:
        aborted_at.append(time.monotonic())
        group.abort("the test wants it")

    timer = threading.Timer(0.3, abort)
    timer.start()
    with pytest.raises(CommunicationError, match="this rank ended the group: the test wants it"):
        BLOCKED[name]()
    delay_s = time.monotonic() - aborted_at[0]
    timer.join()
    for call in (dist.barrier, lambda: dist.send(torch.ones(1), 1)):
        with pytest.raises(CommunicationError, match="the group was aborted: the test wants it"):
            call()
    return delay_s


def _wait_for_the_abort() -> float:
    """The other rank comes late; it is released as well, and learns why."""
    group = the_group()
    while group.wire._core.failure() is None:  # type: ignore[attr-defined]  # looks inside
        time.sleep(0.01)
    with pytest.raises(CommunicationError, match="rank 0 ended the group: the test wants it"):
        barrier_within(15)
    return 0.0


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", BLOCKED)
def test_abort_releases_a_blocked_call(world: World, tmp_path: Path, core: str, name: str) -> None:
    delays = [world.run(on_shm, tmp_path, core, abort_while_blocked, name, backend=None)[0] for _ in range(2)]
    # The promise is 50 ms on a machine that has time; on a busy one the fastest of a few tells more than the slowest.
    assert min(delays) < 0.5


def interrupt_while_blocked() -> str:
    if dist.get_rank() == 1:
        return _learn_of_the_interrupt()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.barrier()
    return "interrupted"


def _learn_of_the_interrupt() -> str:
    group = the_group()
    while group.wire._core.failure() is None:  # type: ignore[attr-defined]  # looks inside
        time.sleep(0.01)
    with pytest.raises(CommunicationError):
        dist.all_reduce(torch.ones(1))
    return "told"


@pytest.mark.parametrize("core", CORES)
def test_control_c_ends_a_blocked_call(world: World, tmp_path: Path, core: str) -> None:
    assert world.run(on_shm, tmp_path, core, interrupt_while_blocked, backend=None) == ["interrupted", "told"]


# ---- creation -----------------------------------------------------------------------------------------------------


def come_or_not(folder: Path, core: str) -> None:
    if os.environ["RANK"] != "1":
        on_shm(folder, core, dist.barrier, timeout_s=1.0)


@pytest.mark.parametrize("core", CORES)
def test_a_rank_that_does_not_come_is_named(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(come_or_not, tmp_path, core, num_ranks=3, backend=None)
    for error in errors_of(outcomes, 0, 2):
        assert isinstance(error, OperationTimeout)
        assert error.context["missing_ranks"] == [1]


def without_memory(folder: Path, core: str) -> None:
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    on_shm(folder, core, dist.barrier)


@pytest.mark.parametrize("core", CORES)
def test_no_memory_for_the_segment_is_an_error_everywhere(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(without_memory, tmp_path, core, num_ranks=3, backend=None)
    assert isinstance(outcomes[0].error, MemoryAllocationFailed)
    assert all(isinstance(error, BackendError) for error in errors_of(outcomes, 1, 2))


def without_dev_shm(folder: Path, core: str) -> float:
    """A job in a mount namespace of its own, where /dev/shm has room for a single page."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 0x44000
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=4096") == 0
    tensor = torch.ones(100_000)
    on_shm(folder, core, dist.all_reduce, tensor)
    return tensor.sum().item()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("core", CORES)
def test_the_size_of_dev_shm_does_not_matter(world: World, tmp_path: Path, core: str) -> None:
    assert world.run(without_dev_shm, tmp_path, core, backend=None) == [200_000.0, 200_000.0]


def test_ranks_of_two_nodes_are_refused_on_both(world: World, tmp_path: Path, lab: Lab) -> None:
    hosts = [lab.host(0), lab.host(1)]
    outcomes = world.outcomes(on_shm, tmp_path, "native", dist.barrier, backend=None, hosts=hosts)
    for error in errors_of(outcomes, 0, 1):
        assert isinstance(error, InvalidArgument)
        assert error.context["ranks_elsewhere"] == [1]


def use_in_a_child() -> str:
    dist.barrier()
    pid = os.fork()
    if pid == 0:
        try:
            dist.barrier()
        except BackendNotInitialized:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dist.barrier()  # the child's end did not end the group
    return "ok"


@pytest.mark.parametrize("core", CORES)
def test_a_forked_child_may_not_use_the_group(world: World, tmp_path: Path, core: str) -> None:
    assert world.run(on_shm, tmp_path, core, use_in_a_child, backend=None) == ["ok", "ok"]


# ---- leaks --------------------------------------------------------------------------------------------------------


def holdings() -> tuple[int, int, int]:
    maps = Path("/proc/self/maps").read_text()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count("torsh-shm")


def come_and_go(folder: Path, core: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    def once() -> None:
        group = dist.new_group([0, 1])
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group, async_op=True).wait()  # type: ignore[union-attr]
        peer = 1 - dist.get_rank()
        requests = [dist.isend(torch.ones(500_000), peer), dist.irecv(torch.ones(500_000), peer)]
        for request in requests:
            assert request is not None
            request.wait()

    Path(folder).mkdir(exist_ok=True)
    for index in range(2):
        (folder / str(index)).mkdir(exist_ok=True)
        before = holdings()
        on_shm(folder / str(index), core, once)
        after = holdings()
    return before, after


@pytest.mark.parametrize("core", CORES)
def test_a_group_gives_back_all_it_took(world: World, tmp_path: Path, core: str) -> None:
    names = set(Path("/dev/shm").iterdir())
    # The second time: the first one loads modules and starts torch's own threads.
    for before, after in world.run(come_and_go, tmp_path, core, backend=None):
        assert after == before
    assert not [name for name in set(Path("/dev/shm").iterdir()) - names if "torsh" in name.name]


def wait_idly(seconds: float) -> float:
    """CPU seconds that a rank burns while it waits that long for another one."""
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(seconds)
    before = time.process_time()
    dist.barrier()
    return time.process_time() - before


@pytest.mark.parametrize("core", CORES)
def test_waiting_does_not_burn_a_core(world: World, tmp_path: Path, core: str) -> None:
    burnt = world.run(on_shm, tmp_path, core, wait_idly, 1.0, num_ranks=4, backend=None)
    assert max(burnt) < 0.2
