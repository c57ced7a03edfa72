"""Workers end together: nobody leaves while another still calls it, and who is gone is an error at once, not a wait."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.rpc import exposed_functions as there
from tests.rpc.conftest import MakeWorker
from torsh_distributed import rpc
from torsh_distributed.errors import CommunicationError, OperationTimeout
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.graceful_end import FOREVER_S

LIMIT_S = 30.0


def leave(worker: RpcWorker, num_workers: int) -> None:
    worker.leave_together(num_workers, FOREVER_S)


def test_who_comes_first_takes_calls_until_the_last_has_come(make_worker: MakeWorker) -> None:
    workers = [make_worker(f"w{rank}", rank=rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(leave, worker, 3) for worker in workers[:2]]
        assert workers[2].call("w0", there.add, (1, 2)) == 3
        assert workers[2].call("w1", there.add, (1, 2)) == 3
        assert not any(end.done() for end in ends)
        ends.append(threads.submit(leave, workers[2], 3))
        for end in ends:
            end.result(LIMIT_S)


@pytest.mark.parametrize("lost", ["w0", "w2"])
def test_a_worker_that_is_gone_ends_the_wait_of_the_others(make_worker: MakeWorker, lost: str) -> None:
    workers = {name: make_worker(name, rank=rank) for rank, name in enumerate(["w0", "w1", "w2"])}
    victim = workers.pop(lost)
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(leave, worker, 3) for worker in workers.values()]
        for worker in workers.values():
            assert worker.ping(victim.name) > 0
        victim.close()
        for end in ends:
            with pytest.raises(CommunicationError, match="w0|worker 0" if lost == "w0" else "w2|a worker is gone"):
                end.result(LIMIT_S)


def test_with_a_timeout_the_others_are_not_waited_for_longer(make_worker: MakeWorker) -> None:
    first = make_worker("w0", rank=0)
    make_worker("w1", rank=1)
    with pytest.raises(OperationTimeout, match="not all workers have come to their end"):
        first.leave_together(2, 0.05)


def test_a_worker_that_waits_for_others_looks_up_those_that_are_there() -> None:
    """As calls do that arrive meanwhile: a client of torch's store does one thing at a time."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client() -> dist.Store:
        return dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))

    with RpcWorker("one", client()) as one, RpcWorker("two", client()), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(one.wait_for, ["late"], timeout_s=LIMIT_S)
        while not waiting.running():
            pass
        for _ in range(20):
            assert one.find("two").name == "two"
        assert not waiting.done(), "looking up did not wait for it"
        with RpcWorker("late", client()):
            waiting.result(LIMIT_S)


def test_a_process_group_and_remote_calls_share_the_jobs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        rpc.init_rpc("me", rank=0, world_size=1)
        assert rpc.rpc_sync("me", there.add, args=(1, 2)) == 3
        rpc.shutdown()
    finally:
        dist.destroy_process_group()
