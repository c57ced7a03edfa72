"""Dask's workers as hosts of ranks: a task on each holds its place until all have one."""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torsh_distributed.clusters.dask import rank_tasks
from torsh_distributed.clusters.hosted.rank_host import (
    HostFacts,
    HostNews,
    HostReady,
    HostUnavailable,
    RankEnded,
    RankFailure,
    RankHost,
    RankOutcome,
    RankSaid,
    RankTask,
    RoomFound,
)
from torsh_distributed.errors import CommunicationError, ConfigurationError, FeatureNotAvailable, OperationTimeout

_log = logging.getLogger(__name__)

_FEWER_WAIT_S = 5.0
"""How long an elastic job waits for its full size before it takes fewer."""
_LOOK_AGAIN_S = 0.5
"""How often the cluster is asked for its workers while some are missing. Dask's event of a new worker comes before the
worker takes tasks, and there is none when it does."""
_END_S = 5.0
_END_WITHOUT_NANNY_S = 25.0
_RESTART_S = 30.0

Partitions = Callable[[Sequence[str]], Sequence[Mapping[str, Any]]]
"""Which data each worker gets: worker addresses in order to futures by name."""


@dataclass
class _WorkerHost:
    """One worker, held by a task."""

    pool: DaskPool
    host_id: int
    worker: str
    future: Any
    is_requested: bool = False
    """Whether it was asked for while the job ran: its coming is news."""
    facts: HostFacts | Any = None
    is_done: bool = False

    def start(self, task: RankTask) -> None:
        self.pool.tell(self, task)

    def send(self, message: Mapping[str, Any]) -> None:
        self.pool.tell(self, dict(message))

    def end(self) -> None:
        self.pool.end(self)


class DaskPool:
    """The workers of one job. Events come on the client's thread; everything else is called from one thread."""

    engine = "dask"

    def __init__(
        self,
        client: Any,
        *,
        start_timeout_s: float,
        workers: Sequence[str] | None = None,
        partitions: Partitions | None = None,
        follows_size: bool = False,
        prepares: bool = False,
    ) -> None:
        """`workers` limits the choice; with `follows_size`, workers that come later are offered to the job.

        `prepares`: ranks are functions, so their workers may import torch as soon as they are held.
        """
        self._prepares = prepares
        self._client = client
        self._start_timeout_s = start_timeout_s
        self._chosen = None if workers is None else frozenset(workers)
        self._partitions = partitions
        self._follows_size = follows_size
        self._topic = f"torsh-{secrets.token_hex(8)}"
        self._hosts: dict[int, _WorkerHost] = {}
        self._next_id = 0
        self._news: queue.SimpleQueue[HostNews | None] = queue.SimpleQueue()
        """None only wakes whoever waits."""
        self._wanted: list[int] = []
        self._has_starting = False
        """Whether a worker had registered and did not take tasks yet, when the cluster was last asked."""
        self._is_open = False

    # Room for ranks

    def gather(self, least: int, most: int) -> Sequence[RankHost]:
        """Workers for the ranks, each with a task on it that waits; see `HostPool`."""
        deadline_s = time.monotonic() + self._start_timeout_s
        self._open()
        workers = self._await_workers(least, most, deadline_s)
        data = self._partitions(workers) if self._partitions is not None else [{}] * len(workers)
        hosts = [self._hold(worker, own) for worker, own in zip(workers, data, strict=True)]
        while any(host.facts is None for host in hosts):
            left_s = deadline_s - time.monotonic()
            news = self.next_news(left_s) if left_s > 0 else None
            if isinstance(news, RankEnded):
                raise self._lost_at_start(hosts, news)
            if left_s <= 0:
                busy = ", ".join(host.worker for host in hosts if host.facts is None)
                raise OperationTimeout(
                    f"{sum(host.facts is not None for host in hosts)} of {len(hosts)} workers were free for a rank "
                    f"within {self._start_timeout_s:g} s; busy: {busy}",
                    hint="other tasks run there; wait for them, add workers or threads, or raise start_timeout_s",
                    operation="start",
                )
        if self._follows_size:
            self._news.put(RoomFound(0))  # workers that came meanwhile
        return list(hosts)

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._client.subscribe_topic(self._topic, self._hear)
        self._client.subscribe_topic("all", self._watch_workers)

    def _await_workers(self, least: int, most: int, deadline_s: float) -> list[str]:
        """At least `least` workers, at most `most`."""
        found = self._free_workers()
        fewer_at_s = min(deadline_s, time.monotonic() + _FEWER_WAIT_S)
        while len(found) < most and (len(found) < least or time.monotonic() < fewer_at_s):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                there = ", ".join(found) or "none"
                raise FeatureNotAvailable(
                    f"{least} workers were asked for, and the Dask cluster has {len(found)}",
                    hint=f"workers: {there}; scale the cluster, ask for fewer, or raise start_timeout_s",
                    workers=least,
                )
            self._news_or_none(min(left_s, _LOOK_AGAIN_S))
            found = self._free_workers()
        return found[:most]

    def _free_workers(self) -> list[str]:
        """The workers without a rank of this job, those of one node beside each other."""
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        held = self._held()
        self._has_starting = any(info.get("status") == "init" for info in known.values())
        free = [
            worker
            for worker, info in known.items()
            if worker not in held
            and (self._chosen is None or worker in self._chosen)
            and info.get("status", "running") == "running"
        ]
        return sorted(free, key=lambda worker: (known[worker].get("host", ""), str(known[worker].get("name", worker))))

    def _hold(self, worker: str, data: Mapping[str, Any], *, host_id: int | None = None) -> _WorkerHost:
        is_requested = host_id is not None
        if host_id is None:
            host_id, self._next_id = self._next_id, self._next_id + 1
        # Known before the task runs: it may say that it is ready before `submit` returns.
        host = self._hosts[host_id] = _WorkerHost(self, host_id, worker, None, is_requested)
        host.future = self._client.submit(
            rank_tasks.hold_rank,
            self._topic,
            host_id,
            dict(data),
            self._prepares,
            workers=[worker],
            allow_other_workers=False,
            pure=False,
            retries=0,
            priority=10,
            key=f"{self._topic}-{host_id}",
        )
        host.future.add_done_callback(lambda done: self._note_end(host, done))
        return host

    def _lost_at_start(self, hosts: Sequence[_WorkerHost], news: RankEnded) -> Exception:
        host = self._hosts[news.host_id]
        failure = news.outcome.failure
        reason = failure.summary if failure is not None else "it ended"
        if failure is not None and failure.kind in ("ModuleNotFoundError", "ImportError"):
            return ConfigurationError(
                f"torsh-distributed cannot be imported on {host.worker}: {failure.message}",
                hint="start Dask's workers from the same environment as this program",
                worker=host.worker,
            )
        from torsh_distributed.errors import ProcessFailure

        return ProcessFailure(
            f"the Dask worker {host.worker} was lost while the job started",
            hint="look at the worker's log; it may have run out of memory",
            operation="start",
            reason=reason,
            num_workers=len(hosts),
        )

    def request(self, count: int) -> Sequence[int]:
        """More workers: those that are free now, then those that come."""
        numbers = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        self._wanted += numbers
        self._fill(self._free_workers())
        return numbers

    def _fill(self, free: Sequence[str]) -> None:
        """Hold free workers for the hosts that were asked for."""
        for worker in free[: len(self._wanted)]:
            self._hold(worker, {}, host_id=self._wanted.pop(0))

    def open_store(self, hosts: Sequence[RankHost], secret: str) -> tuple[str, int]:
        """A store in the scheduler's process, which outlives every worker."""
        try:
            scheduler = self._client.run_on_scheduler(rank_tasks.scheduler_facts)
        except ImportError as error:
            raise ConfigurationError(
                "torsh-distributed cannot be imported on the Dask scheduler",
                hint="start the scheduler from the same environment as the workers",
                reason=str(error),
            ) from error
        is_local = {host.facts.network for host in hosts} == {scheduler["network"]}
        address, port = self._client.run_on_scheduler(rank_tasks.open_store, self._topic, secret, is_local)
        return str(address), int(port)

    # Ranks

    def tell(self, host: _WorkerHost, message: Any) -> None:
        """Put something into the mailbox of a host."""
        if not host.is_done:
            self._client.run(
                rank_tasks.deliver, host.future.key, message, workers=[host.worker], on_error="ignore", nanny=False
            )

    def end(self, host: _WorkerHost) -> None:
        """Ask a rank to end; the worker stays."""
        self.tell(host, {"type": "abort", "reason": "this rank is not wanted any more"})

    def next_news(self, timeout_s: float) -> HostNews | None:
        """See `HostPool`."""
        news = self._news_or_none(min(timeout_s, _LOOK_AGAIN_S) if self._has_starting else timeout_s)
        if isinstance(news, RoomFound) or (news is None and self._has_starting):
            # Counted now: several workers may have come since. Asked once: a worker that a second question finds ready
            # would be waited for no longer, and held by nobody.
            free = self._free_workers()
            room = len(self._held()) + len(free)
            self._fill(free)
            return RoomFound(room) if self._follows_size else None
        return news

    def _held(self) -> set[str]:
        """Workers with a rank of this job."""
        return {host.worker for host in self._hosts.values() if not host.is_done}

    def _news_or_none(self, timeout_s: float) -> HostNews | None:
        try:
            return self._news.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    # On the client's thread

    def _hear(self, event: tuple[float, Any]) -> None:
        """A host has something to say."""
        message = dict(event[1])
        host = self._hosts.get(int(message.pop("host_id")))
        if host is None:
            return
        if message["type"] == "ready":
            facts = message["facts"]
            host.facts = HostFacts(**{**facts, "gpus": tuple(facts["gpus"])})
            self._news.put(HostReady(host) if host.is_requested else None)
        else:
            self._news.put(RankSaid(host.host_id, message))

    def _watch_workers(self, event: tuple[float, Any]) -> None:
        """The cluster has one worker more or fewer."""
        message = event[1]
        if not isinstance(message, dict):
            return
        if message.get("action") == "add-worker":
            self._news.put(RoomFound(0))
        elif message.get("action") == "remove-worker":
            for host in list(self._hosts.values()):
                if host.worker == message.get("worker") and not host.is_done:
                    host.is_done = True
                    failure = RankFailure(
                        kind="the Dask worker is lost",
                        message=f"{host.worker} left the cluster",
                        exit_code=137,
                        is_host_lost=True,
                    )
                    self._put_end(host, RankOutcome(failure=failure))

    def _note_end(self, host: _WorkerHost, done: Any) -> None:
        if host.is_done:
            return
        host.is_done = True
        if done.status == "finished":
            try:
                outcome = done.result()
            except Exception as error:
                outcome = RankOutcome(failure=RankFailure(kind=type(error).__name__, message=str(error)))
        else:
            raised = done.exception() if done.status == "error" else None
            kind = type(raised).__name__ if raised is not None else f"the task is {done.status}"
            outcome = RankOutcome(failure=RankFailure(kind=kind, message=str(raised or ""), error=raised))
        self._put_end(host, outcome)

    def _put_end(self, host: _WorkerHost, outcome: RankOutcome) -> None:
        if host.facts is None and outcome.failure is not None and host.is_requested:
            self._news.put(HostUnavailable(host.host_id, outcome.failure.summary))
        else:
            self._news.put(RankEnded(host.host_id, outcome))

    def release(self) -> None:
        """See `HostPool`. A rank that does not end takes its worker with it: the nanny starts another."""
        # A task that has not begun only waits for its turn: it is cancelled, and whatever runs there is left alone.
        running = [host for host in self._hosts.values() if not host.is_done and host.facts is not None]
        if self._is_open:
            self._client.run_on_scheduler(rank_tasks.close_store, self._topic)
        for host in running:
            self.tell(host, {"type": "abort", "reason": "the job ends"})
        self._await_ends(running)
        if self._is_open:
            self._client.unsubscribe_topic(self._topic)
            self._client.unsubscribe_topic("all")
            self._is_open = False
        self._client.cancel([host.future for host in self._hosts.values()])
        self._hosts, self._wanted = {}, []
        self._news = queue.SimpleQueue()

    def _await_ends(self, running: Sequence[_WorkerHost]) -> None:
        if not running:
            return
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        has_nanny = {worker for worker, info in known.items() if info.get("nanny")}
        limit_s = _END_S if all(host.worker in has_nanny for host in running) else _END_WITHOUT_NANNY_S
        deadline_s = time.monotonic() + limit_s
        while any(not host.is_done for host in running) and (left_s := deadline_s - time.monotonic()) > 0:
            self._news_or_none(left_s)
        stuck = [host.worker for host in running if not host.is_done]
        if not stuck:
            return
        _log.warning("ranks on %s did not end within %g s: their workers are restarted", ", ".join(stuck), limit_s)
        try:
            self._client.restart_workers([worker for worker in stuck if worker in has_nanny], timeout=_RESTART_S)
        except (TimeoutError, ValueError, KeyError) as error:
            raise CommunicationError(
                "a rank does not end, and its Dask worker could not be restarted",
                hint=f"end the processes of the workers {', '.join(stuck)}",
                reason=str(error),
            ) from error
        alone = [worker for worker in stuck if worker not in has_nanny]
        if alone:
            raise CommunicationError(
                f"a rank does not end on {', '.join(alone)}",
                hint="end these worker processes; workers under a nanny are restarted by themselves",
            )
