"""What runs on the cluster: an actor for each rank, and one that carries messages and serves the store.

Plain classes: `actor_pool` turns them into actors with the resources of the job, so that importing this module does
not import Ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from torsh_distributed.clusters.hosted.rank_host import HostFacts, RankOutcome, RankTask, own_facts
from torsh_distributed.clusters.hosted.rank_run import RankRun, import_for_ranks

_LISTEN_S = 10.0


class RankActor:
    """Hosts one rank. The function runs on the actor's main thread, as in a process of its own."""

    def __init__(self, host_id: int) -> None:
        self._host_id = host_id

    @override
    def __repr__(self) -> str:
        # Ray shows it before every line that the worker prints.
        return f"worker {self._host_id}"

    def describe(self) -> HostFacts:
        """This process, and the devices that Ray gave it."""
        import ray

        address = ray.util.get_node_ip_address()
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return own_facts(f"Ray worker {self._host_id} on {address}", address=address, gpus=gpus)

    def prepare(self) -> None:
        """Import what a rank's function needs, while the job still gathers others and opens its store."""
        import_for_ranks()

    def run(self, task: RankTask, leader: Any) -> RankOutcome:
        """Run the rank to its end; messages pass through `leader` meanwhile."""
        import ray

        said: list[Any] = []

        def say(message: Mapping[str, Any]) -> None:
            said[:] = [leader.say.remote(self._host_id, dict(message))]

        run = RankRun(task, say=say)
        is_over = threading.Event()
        threading.Thread(target=self._listen, args=(leader, run, is_over), name="torsh-listen", daemon=True).start()
        try:
            return run.run()
        finally:
            is_over.set()
            # What was said last must have arrived before the rank counts as ended.
            if said:
                ray.wait(said, timeout=_LISTEN_S)

    def _listen(self, leader: Any, run: RankRun, is_over: threading.Event) -> None:
        """Take messages of the job for this rank, until it has ended or the job is gone."""
        import ray

        while not is_over.is_set():
            try:
                messages = ray.get(leader.next_for.remote(self._host_id))
            except ray.exceptions.RayError:
                run.abort("the job's leader is gone")
                return
            for message in messages:
                if message["type"] == "abort":
                    run.abort(str(message["reason"]))
                else:
                    run.deliver(message)


class LeaderActor:
    """Serves the store of the ranks and carries messages between them and the job; it outlives every rank."""

    def __init__(self, *, is_elastic: bool = True) -> None:
        self._is_elastic = is_elastic
        self._news: asyncio.Queue[tuple[str, int, Any]] = asyncio.Queue()
        self._outboxes: dict[int, asyncio.Queue[Mapping[str, Any]]] = {}
        self._store: Any = None

    async def describe(self) -> HostFacts:
        """This process."""
        import ray

        address = ray.util.get_node_ip_address()
        return own_facts(f"Ray leader on {address}", address=address)

    async def open_store(self, address: str, secret: str) -> int:
        """Serve an empty store that asks for the secret, on this address alone; its port."""
        from torsh_distributed.comm.store.tcp.tcp_server import TcpStoreServer

        if self._store is not None:
            self._store.close()
        self._store = TcpStoreServer(address, 0, token=secret)
        return int(self._store.port)

    async def say(self, host_id: int, message: Mapping[str, Any]) -> None:
        """A rank has a message for the job."""
        await self._news.put(("said", host_id, message))

    async def scale(self, workers: int) -> bool:
        """Somebody wants that many workers; whether the job can change its size."""
        if self._is_elastic:
            await self._news.put(("scale", -1, workers))
        return self._is_elastic

    async def take(self) -> list[tuple[str, int, Any]]:
        """The job takes its messages, as soon as there is one."""
        found = [await self._news.get()]
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return found

    async def post(self, host_ids: Sequence[int], message: Mapping[str, Any]) -> None:
        """The job has a message for these ranks."""
        for host_id in host_ids:
            await self._outbox(host_id).put(message)

    async def next_for(self, host_id: int) -> list[Mapping[str, Any]]:
        """A rank takes its messages; none after a while, so that it can end."""
        outbox = self._outbox(host_id)
        try:
            found = [await asyncio.wait_for(outbox.get(), _LISTEN_S)]
        except TimeoutError:
            return []
        while not outbox.empty():
            found.append(outbox.get_nowait())
        return found

    def _outbox(self, host_id: int) -> asyncio.Queue[Mapping[str, Any]]:
        return self._outboxes.setdefault(host_id, asyncio.Queue())
