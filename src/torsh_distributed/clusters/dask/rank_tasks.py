"""What runs on the cluster: a task that hosts a rank on its worker, and the store in the scheduler's process.

The task holds its place on the worker from the moment the job is gathered, so that all ranks start at once or none.
What it is to run, and messages for its rank, come by `client.run`, which does not wait in the worker's queue; what the
rank says goes out as an event of the job's own topic.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torsh_distributed.clusters.hosted.rank_host import RankOutcome, RankTask, own_facts
from torsh_distributed.clusters.hosted.rank_run import RankRun, import_for_ranks

_LOOK_S = 1.0
"""How often a worker looks whether anybody still wants its rank: a client that died says nothing."""

_mailboxes: dict[str, queue.SimpleQueue[Any]] = {}
"""Of the ranks that this process hosts, by the key of their task."""

_stores: dict[str, Any] = {}
"""Of the jobs of this scheduler, by their topic."""


def hold_rank(topic: str, host_id: int, data: dict[str, Any], prepares: bool) -> RankOutcome:
    """The task: say that there is room, wait for the rank, run it. `data` has the worker's own partitions by name.

    `prepares`: the rank will be a function, so what it needs is imported while the job still gathers others.
    """
    from distributed import get_worker
    from distributed.worker import thread_state

    worker, key = get_worker(), str(thread_state.key)
    mailbox = _mailboxes[key] = queue.SimpleQueue()
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(worker, key, mailbox, is_over), name="torsh-watch", daemon=True).start()

    def say(message: Mapping[str, Any]) -> None:
        worker.log_event(topic, {"host_id": host_id, **message})

    try:
        facts = own_facts(f"Dask worker {worker.address}", address=_host_of(worker.address))
        say({"type": "ready", "facts": asdict(facts)})
        if prepares:
            import_for_ranks()
        task = mailbox.get()
        if not isinstance(task, RankTask):
            return RankOutcome()  # the job does not start
        run = RankRun(task, say=say, own_arguments=data)
        threading.Thread(target=_pass_on, args=(run, mailbox), name="torsh-mailbox", daemon=True).start()
        return run.run()
    finally:
        is_over.set()
        mailbox.put(None)
        del _mailboxes[key]


def _pass_on(run: RankRun, mailbox: queue.SimpleQueue[Any]) -> None:
    """Hand the job's messages to the rank until it has ended."""
    while (message := mailbox.get()) is not None:
        if message["type"] == "abort":
            run.abort(str(message["reason"]))
        else:
            run.deliver(message)


def _watch(worker: Any, key: str, mailbox: queue.SimpleQueue[Any], is_over: threading.Event) -> None:
    """End the rank when its client is gone: the scheduler then forgets the task, which no thread notices by itself."""
    while not is_over.wait(_LOOK_S):
        state = worker.state.tasks.get(key)
        if state is None or state.state in ("cancelled", "released", "forgotten"):
            mailbox.put({"type": "abort", "reason": "the job's client is gone"})
            return


def deliver(key: str, message: Any) -> bool:
    """On a worker: put a message into the mailbox of the rank that it hosts; whether there is one."""
    mailbox = _mailboxes.get(key)
    if mailbox is None:
        return False
    mailbox.put(message)
    return True


def open_store(topic: str, secret: str, is_local: bool, dask_scheduler: Any = None) -> tuple[str, int]:
    """On the scheduler: serve an empty store that asks for the secret; its address and port."""
    from torsh_distributed.comm.store.tcp.tcp_server import TcpStoreServer

    close_store(topic)
    address = "127.0.0.1" if is_local else _host_of(dask_scheduler.address)
    store = _stores[topic] = TcpStoreServer(address, 0, token=secret)
    return address, store.port


def close_store(topic: str) -> None:
    """On the scheduler: end the job's store, if there is one; ranks that wait in it stop waiting."""
    store = _stores.pop(topic, None)
    if store is not None:
        store.close()


def scheduler_facts(dask_scheduler: Any = None) -> dict[str, Any]:
    """On the scheduler: its own facts."""
    return asdict(own_facts(f"Dask scheduler {dask_scheduler.address}", address=_host_of(dask_scheduler.address)))


def _host_of(address: str) -> str:
    """The host of Dask's `tcp://host:port`; loopback for addresses within one process."""
    from distributed.comm import get_address_host

    try:
        return str(get_address_host(address))
    except (KeyError, ValueError, TypeError, AttributeError):
        return "127.0.0.1"
