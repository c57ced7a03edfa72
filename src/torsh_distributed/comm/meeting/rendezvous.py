"""How a world comes up: open the store, arrive, and learn who else is there.

Every rank appends its arrival to a log in the store; rank 0 reads the log, checks it and publishes one verdict for all.
So a duplicate rank, a differing world size or an absent rank is an error on every rank, within the deadline and by
name, where c10d alone would hang or time out without saying who.

The store that `torsh run` serves to its workers, and how torch's own `env://` finds it.
torch would open a TCPStore at MASTER_ADDR:MASTER_PORT, to which anyone may connect. The launcher serves a store that
asks for the job's secret instead, so the one function of torch that makes such stores is wrapped: for the job's own
address it opens the launcher's store, for every other address it does what it did.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from torsh_distributed.comm.meeting.network_interface import network_identity
from torsh_distributed.comm.meeting.node_identity import node_identity, pack_nodes, unpack_nodes
from torsh_distributed.comm.meeting.software_versions import NodeSoftware, own_software, software_differences
from torsh_distributed.comm.meeting.store_meeting import StoreMeeting, wait_for_keys
from torsh_distributed.comm.store.registry import open_store as open_store_at
from torsh_distributed.comm.store.tcp.tcp_server import tcp_url
from torsh_distributed.comm.trust.job_secret import STORE_VARIABLE, job_secret
from torsh_distributed.comm.trust.job_tls import find_tls
from torsh_distributed.errors import (
    CommunicationError,
    ConfigurationError,
    OperationTimeout,
    SerializationError,
    TorshError,
)
from torsh_distributed.plan.sections.recovery import RetryConfig
from torsh_distributed.retry import retry


def job_store_url(host: str, port: int) -> str | None:
    """Where the launcher serves the store of the job at host:port; None if it serves none there."""
    url = os.environ.get(STORE_VARIABLE)
    is_ours = (host, str(port)) == (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return url if url and is_ours else None


def open_job_store(url: str, timeout: timedelta, *, retry: RetryConfig | None = None) -> dist.Store:
    """Connect to the launcher's store; raises if this process does not know the job's secret."""
    secret = job_secret()
    if secret is None:
        raise ConfigurationError(
            "the job's store asks for a secret that this process does not have",
            hint="keep TORSH_SECRET_FILE in the environment of processes that join the job",
            store=url,
        )
    return open_store_at(url, timeout_s=timeout.total_seconds(), token=secret.decode(), retry=retry)


# Ranks that wait for the verdict give rank 0 this long beyond the deadline to publish it.
_VERDICT_GRACE_S = 2.0
_ACK_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a rank publishes about itself when it joins."""

    rank: int
    world_size: int
    host: str
    pid: int
    node: str
    """Equal for ranks of one node; see `node_identity`."""
    network: str
    """Equal for ranks that share a loopback; see `network_identity`."""
    software: dict[str, str]
    """The fields of `NodeSoftware`: not every launcher compares them before it starts ranks."""
    num_gpus: int = 0
    has_gpu: bool = False
    """Whether there is one at all, though perhaps not for each rank."""
    """The GPUs that it sees; 0 if they are too few for the ranks of its node."""
    unusable_backends: dict[str, str] = field(default_factory=dict)
    """Of the backends it was given to choose from, those that do not work here, and why."""

    @override
    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Roster:
    """Where every rank of the world lives: `nodes[rank]` is its node's number, in the order of their lowest ranks."""

    nodes: tuple[int, ...]
    shares_loopback: bool = False
    """Whether all ranks reach each other without a network, whatever their launcher calls a node."""
    clock_ahead_s: float = 0.0
    """How far this rank's wall clock is ahead of rank 0's, to within the moment in which the verdict travels."""
    has_gpu_each: bool = False
    """Whether every rank of the world can have a GPU of its own."""
    has_gpus: bool = False
    """Whether every node has a GPU that its ranks can share."""
    unusable_backends: Mapping[str, str] = field(default_factory=dict)
    """Backends that some rank cannot use, with the first such rank and its reason."""

    @cached_property
    def node_order(self) -> tuple[int, ...]:
        """The distinct nodes, in the order of their lowest rank."""
        return tuple(dict.fromkeys(self.nodes))

    def node_rank(self, rank: int) -> int:
        """The index of the rank's node."""
        return self.nodes[rank]

    def node_ranks(self, rank: int) -> tuple[int, ...]:
        """All ranks of the same node, in order."""
        return tuple(other for other, node in enumerate(self.nodes) if node == self.nodes[rank])

    def local_rank(self, rank: int) -> int:
        """The rank's index within its node."""
        return self.node_ranks(rank).index(rank)


def open_store(
    host: str,
    port: int,
    *,
    is_host: bool,
    timeout_s: float,
    has_torch_agent: bool = False,
    policy: RetryConfig | None = None,
) -> dist.Store:
    """Connect to the store of the job at host:port, hosting it first on the rank that should.

    `has_torch_agent`: torchrun serves a store of torch's there.
    With the job's secret it is our store, which asks for it; without one it is torch's, which asks for nothing. The
    listener is bound to `host` alone (loopback stays loopback). Connecting is retried until the deadline.
    """
    limit = timedelta(seconds=timeout_s)
    launchers = job_store_url(host, port)
    if launchers is not None:
        return open_job_store(launchers, limit, retry=policy)
    secret = None if has_torch_agent else job_secret()
    if secret is not None:
        return open_store_at(
            tcp_url(host, port), timeout_s=timeout_s, is_server=is_host, token=secret.decode(), retry=policy
        )
    if find_tls() is not None:
        raise ConfigurationError(
            "this job is to be under TLS, and torch's store, which it would meet in, has none",
            hint="start it with `torsh run --tls`, or give all ranks the job's secret (TORSH_SECRET_FILE)",
            master_addr=host,
        )
    if is_host:
        listener = _listen(host, port)
        actual_port = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            actual_port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listener.detach(),
        )
    _wait_for_listener(host, port, timeout_s)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((address[0], port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(
            f"the store cannot listen on {host}:{port}: {error.strerror or error}",
            hint=(
                "another program or another rank 0 has this port: choose a free MASTER_PORT on all ranks"
                if error.errno == errno.EADDRINUSE
                else "MASTER_ADDR must be an address of the node on which rank 0 runs"
            ),
            master_addr=host,
            master_port=port,
        ) from error
    return listener


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Return once host:port accepts connections. Polls, because there is no event for a remote listener."""
    policy = RetryConfig(
        max_retries=1_000_000, initial_delay_s=0.02, multiplier=1.5, max_delay_s=0.5, total_timeout_s=timeout_s
    )

    @retry(policy)
    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=min(5.0, timeout_s)).close()
        except OSError as error:
            raise CommunicationError(f"{host}:{port} does not answer: {error}") from error

    try:
        connect()
    except CommunicationError as error:
        raise OperationTimeout(
            f"the store at {host}:{port} did not answer within {timeout_s:g} s; rank 0 hosts it, or the launcher",
            hint="check that rank 0 is running and that MASTER_ADDR and MASTER_PORT are right and reachable from here",
            operation="rendezvous",
            missing_ranks=[0],
            reason=str(error.__cause__),
        ) from error


def join(
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    node: str | None = None,
    num_gpus: int = 0,
    has_gpu: bool = False,
    unusable_backends: Mapping[str, str] | None = None,
) -> Roster:
    """Arrive and return the roster once all `world_size` ranks have; every rank calls this.

    Raises ConfigurationError on every rank if two ranks have the same number or world sizes differ, and
    OperationTimeout with the missing ranks if not all arrive within `timeout_s`.
    """
    me = Arrival(
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        node=node or node_identity(),
        network=network_identity(),
        software=asdict(own_software()),
        num_gpus=num_gpus,
        has_gpu=has_gpu,
        unusable_backends=dict(unusable_backends or {}),
    )
    meeting = StoreMeeting(store, rank=rank, num_ranks=world_size, timeout_s=timeout_s, operation="rendezvous")
    # Arrivals are numbered in order, not by rank: two processes may claim one rank.
    meeting.publish("arrival", store.add("arrivals", 1), asdict(me))
    if rank == 0 and store.add("leader", 1) == 1:
        verdict = _decide(store, meeting, me)
        meeting.publish("verdict", 0, verdict)
        if "error" in verdict:
            _await_acknowledgements(store)
    else:
        verdict = _await_verdict(store, meeting, me)
    if "error" in verdict:
        raise _to_error(verdict)
    # All wait for the verdict, so they read it at nearly the same moment.
    return Roster(
        unpack_nodes(verdict["nodes"]),
        verdict["shares_loopback"],
        time.time() - verdict["clock_s"],
        verdict["has_gpu_each"],
        verdict["has_gpus"],
        verdict["unusable_backends"],
    )


def _decide(store: dist.Store, meeting: StoreMeeting, me: Arrival) -> dict[str, Any]:
    """On rank 0: read arrivals until the world is complete, wrong, or late."""
    present: dict[int, Arrival] = {}
    num_read = 0
    while len(present) < me.world_size:
        # All that have a number by now, in one question: thousands arrive at once. At least the next one.
        newest = max(num_read + 1, store.add("arrivals", 0))
        arrivals = _read_arrivals(meeting, range(num_read + 1, newest + 1))
        num_read = newest
        for arrival in arrivals:
            if arrival is None:
                continue
            objection = _objection(arrival, me, present)
            if objection is not None:
                return objection
            present[arrival.rank] = arrival
        if None in arrivals:
            return _absent(present, me.world_size)
    ranks_of = Counter(arrival.node for arrival in present.values())
    return {
        "nodes": pack_nodes([present[rank].node for rank in range(me.world_size)]),
        "has_gpu_each": all(ranks_of[arrival.node] <= arrival.num_gpus for arrival in present.values()),
        "has_gpus": all(arrival.has_gpu for arrival in present.values()),
        "shares_loopback": len({arrival.network for arrival in present.values()}) == 1,
        "unusable_backends": {
            name: f"{reason} (rank {rank})"
            for rank in reversed(range(me.world_size))
            for name, reason in present[rank].unusable_backends.items()
        },
        "clock_s": time.time(),
    }


def _objection(arrival: Arrival, me: Arrival, present: dict[int, Arrival]) -> dict[str, Any] | None:
    """Why there can be no world with this rank, as a verdict; None if there can."""
    if arrival.world_size != me.world_size:
        message = (
            f"the ranks disagree on the world size: {me} says {me.world_size}, {arrival} says {arrival.world_size}"
        )
        return {"error": "config", "message": message, "hint": "start every rank with the same WORLD_SIZE"}
    if arrival.rank in present:
        return {
            "error": "config",
            "message": f"two processes joined as rank {arrival.rank}: {present[arrival.rank]} and {arrival}",
            "hint": "give every process its own RANK; LOCAL_RANK repeats on each node and is not it",
        }
    differences = software_differences(NodeSoftware(**me.software), NodeSoftware(**arrival.software))
    if differences:
        return {
            "error": "config",
            "message": f"{arrival} runs other software than {me}: {'; '.join(differences)}",
            "hint": "start all ranks from the same environment",
        }
    return None


def _absent(present: dict[int, Arrival], world_size: int) -> dict[str, Any]:
    missing = [rank for rank in range(world_size) if rank not in present]
    return {
        "error": "timeout",
        "message": f"{len(present)} of {world_size} ranks joined in time; missing: {_ranges(missing)}",
        "hint": "look at the output of the missing ranks; start them, or lower WORLD_SIZE",
        "missing_ranks": missing,
    }


def _read_arrivals(
    meeting: StoreMeeting, numbers: Sequence[int], timeout_s: float | None = None
) -> list[Arrival | None]:
    try:
        records = meeting.poll_many("arrival", numbers, timeout_s)
        return [None if record is None else Arrival(**record) for record in records]
    except (TypeError, ValueError) as error:
        raise SerializationError(
            "an arrival in the store cannot be read",
            hint="all ranks must run the same version; or another program uses this port",
            operation="rendezvous",
        ) from error


def _await_verdict(store: dist.Store, meeting: StoreMeeting, me: Arrival) -> dict[str, Any]:
    verdict: dict[str, Any] | None = meeting.poll("verdict", 0, meeting.remaining_s + _VERDICT_GRACE_S)
    if verdict is None:
        return _verdict_without_leader(store, meeting, me)
    if "error" in verdict:
        # Readers are numbered by order because duplicate ranks are one of the errors.
        meeting.publish("read", store.add("reads", 1) + 1, None)
    return verdict


def _verdict_without_leader(store: dist.Store, meeting: StoreMeeting, me: Arrival) -> dict[str, Any]:
    """Rank 0 never decided: say who is there, from the log."""
    arrivals = _read_arrivals(meeting, range(1, store.add("arrivals", 0) + 1), 1.0)
    return _absent({arrival.rank: arrival for arrival in arrivals if arrival is not None}, me.world_size)


def _await_acknowledgements(store: dist.Store) -> None:
    """Rank 0 may host the store: stay until all who arrived have read the verdict, or the grace time is over."""
    others = [f"read/{index}" for index in range(2, store.add("arrivals", 0) + 1)]
    # A process that died after arriving never reads the verdict, so the result of the wait does not matter.
    wait_for_keys(store, others, _ACK_GRACE_S)


def _to_error(verdict: dict[str, Any]) -> TorshError:
    message, hint = str(verdict["message"]), str(verdict["hint"])
    if verdict["error"] == "timeout":
        return OperationTimeout(message, hint=hint, operation="rendezvous", missing_ranks=verdict["missing_ranks"])
    return ConfigurationError(message, hint=hint, operation="rendezvous")


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5": a missing node is many ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
