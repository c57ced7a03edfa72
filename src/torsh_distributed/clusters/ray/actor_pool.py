"""Ray's actors as hosts of ranks: a placement group reserves room for all of them at once, or for none."""

from __future__ import annotations

import collections
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torsh_distributed.clusters.hosted.hosted_job import HostedJob, HostedSpec
from torsh_distributed.clusters.hosted.rank_host import (
    EntryWork,
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
    SizeWanted,
    pack_function,
)
from torsh_distributed.clusters.hosted.reporting import ReportSink
from torsh_distributed.clusters.ray.rank_actor import LeaderActor, RankActor
from torsh_distributed.clusters.ray.ray_config import RayConfig, most_that_fit
from torsh_distributed.clusters.ray.ray_connection import (
    CarriedCode,
    connected,
    refuse_ray_client,
    require_package,
    shown,
    totals_by_node,
)
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, OperationTimeout, ProcessFailure
from torsh_distributed.launch.spec import ElasticSpec

_log = logging.getLogger(__name__)

LEADER_NAMESPACE = "torsh"
_FEWER_WAIT_S = 5.0
"""How long an elastic job waits for its full size before it takes fewer."""
_SCRIPT_END_S = 5.0
_KILL_S = 10.0


@dataclass
class _ActorHost:
    """One actor."""

    pool: RayPool
    host_id: int
    actor: Any
    bundle: int | None
    is_beside_code: bool = False
    """Whether the job's code lies on its node already."""
    facts: HostFacts | Any = None

    def start(self, task: RankTask) -> None:
        self.pool.start(self, task)

    def send(self, message: Mapping[str, Any]) -> None:
        self.pool.post([self.host_id], message)

    def end(self) -> None:
        self.pool.kill(self)


class RayPool:
    """The actors of one job. Used from one thread."""

    engine = "ray"

    def __init__(
        self,
        ray: Any,
        config: RayConfig,
        *,
        is_elastic: bool = False,
        leader_name: str | None = None,
        prepares: bool = False,
        carried: CarriedCode | None = None,
    ) -> None:
        """`leader_name` lets other processes find the job's leader, to change the size of an elastic job.

        `prepares`: ranks are functions, so their actors may import torch as soon as they are up. `carried` is what
        their nodes need of a submitted job, where Ray does not see to it by itself.
        """
        self._carried = carried
        self._nodes_of_bundles: Mapping[int, str] = {}
        self._prepares = prepares
        self._ray = ray
        self._config = config
        self._is_elastic = is_elastic
        self._leader_name = leader_name
        self._leader: Any = None
        self._group: Any = None
        self._hosts: dict[int, _ActorHost] = {}
        self._running: dict[Any, int] = {}
        """The results that ranks will have, with their hosts."""
        self._starting: dict[Any, int] = {}
        self._scripts: set[int] = set()
        self._free_bundles: list[int] = []
        self._inbox: Any = None
        self._news: collections.deque[HostNews] = collections.deque()
        self._numbers = itertools.count()

    # Room for ranks

    def gather(self, least: int, most: int) -> Sequence[RankHost]:
        """Actors for the ranks, all of them up; see `HostPool`."""
        count = self._fitting(least, most)
        deadline_s = time.monotonic() + self._config.start_timeout_s
        for number in range(count, least - 1, -1):
            is_last = number == least
            limit_s = deadline_s - time.monotonic() if is_last else _FEWER_WAIT_S
            if self._reserve(number, max(0.0, limit_s)):
                return self._start_actors(number, deadline_s)
        asked = shown(self._config.bundle)
        raise OperationTimeout(
            f"Ray had no room for {least} workers ({asked} each) within {self._config.start_timeout_s:g} s",
            hint=f"other jobs hold the rest; free now: {shown(self._ray.available_resources()) or 'nothing'}; "
            "raise start_timeout_s, or make the job elastic",
            operation="placement group",
            placement=self._config.placement,
        )

    def _fitting(self, least: int, most: int) -> int:
        """How many workers to ask for; raises with what there is if the cluster is too small for `least`."""
        config, nodes = self._config, totals_by_node(self._ray)
        fitting = most_that_fit(list(nodes.values()), config.bundle, config.placement)
        if config.waits_for_nodes:
            return most
        if fitting < least:
            there = "; ".join(f"{name}: {shown(total)}" for name, total in nodes.items())
            raise FeatureNotAvailable(
                f"{least} workers of {shown(config.bundle) or 'nothing'} were asked for ({config.placement}), "
                f"and the cluster has room for {fitting}",
                hint=f"there is {there}; ask for less, add nodes, or set waits_for_nodes for an autoscaler",
                workers=least,
            )
        return min(most, fitting)

    def _reserve(self, count: int, timeout_s: float) -> bool:
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        bundle = self._config.bundle or {"CPU": 0.001}
        group = placement_group([dict(bundle)] * count, strategy=self._config.placement)
        try:
            if group.wait(timeout_seconds=timeout_s):
                self._group = group
                if self._carried is not None:
                    self._nodes_of_bundles = placement_group_table(group)["bundles_to_node_id"]
                return True
        finally:
            if self._group is not group:
                remove_placement_group(group)
        return False

    def _start_actors(self, count: int, deadline_s: float) -> list[RankHost]:
        here = self._ray.get_runtime_context().get_node_id()
        hosts = [
            self._new_host(bundle, is_beside_code=self._nodes_of_bundles.get(bundle) == here) for bundle in range(count)
        ]
        refs = [self._describe(host) for host in hosts]
        self._open_leader()  # last: Ray has as many processes ready as there are cores, and ranks need theirs longer
        try:
            facts = self._ray.get(refs, timeout=max(1.0, deadline_s - time.monotonic()))
        except self._ray.exceptions.GetTimeoutError as error:
            raise OperationTimeout(
                f"the actors of {count} workers did not start within {self._config.start_timeout_s:g} s",
                hint="look at `ray list actors`; a runtime environment that installs packages takes longer",
                operation="actor start",
            ) from error
        except self._ray.exceptions.RuntimeEnvSetupError as error:
            raise ConfigurationError(
                "Ray could not set up the runtime environment of the workers",
                hint="check runtime_env: its working_dir must exist, its packages must be found",
                reason=str(error),
            ) from error
        except self._ray.exceptions.RayError as error:
            require_package(self._ray, self._group, self._config.runtime_env, count)
            raise ProcessFailure(
                "a worker was lost while it started",
                hint="look at the log of the actor with `ray logs`; its node may have run out of memory",
                operation="actor start",
                reason=_first_lines(error),
            ) from error
        for host, found in zip(hosts, facts, strict=True):
            host.facts = found
        return list(hosts)

    def _open_leader(self) -> None:
        if self._leader is not None:
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Beside the driver, without which the job ends anyway: an actor that needs nothing would be put on any node,
        # and take the job with it when that node is lost. Not softly: Ray prefers another node to a busy one then.
        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": here}
        if self._leader_name is not None:
            options.update(name=self._leader_name, namespace=LEADER_NAMESPACE)
        self._leader = self._ray.remote(LeaderActor).options(**options).remote(is_elastic=self._is_elastic)
        self._inbox = self._leader.take.remote()

    def _new_host(self, bundle: int | None, *, is_beside_code: bool = False) -> _ActorHost:
        """An actor in a bundle of the group, or, beside the group, wherever there is room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config, host_id = self._config, next(self._numbers)
        options: dict[str, Any] = {
            "num_cpus": config.cpus_per_worker,
            "num_gpus": config.gpus_per_worker,
            "resources": dict(config.resources_per_worker),
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if config.memory_per_worker_bytes is not None:
            options["memory"] = config.memory_per_worker_bytes
        carried = {} if self._carried is None or is_beside_code else self._carried.runtime_env
        if config.runtime_env or carried:
            options["runtime_env"] = {**carried, **config.runtime_env}
        if bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        actor = self._ray.remote(RankActor).options(**options).remote(host_id)
        host = self._hosts[host_id] = _ActorHost(self, host_id, actor, bundle, is_beside_code)
        return host

    def request(self, count: int) -> Sequence[int]:
        """More actors, which come when there is room."""
        # First in the places of workers that are gone: the group still holds them for this job.
        hosts = [self._new_host(self._free_bundles.pop() if self._free_bundles else None) for _ in range(count)]
        for host in hosts:
            self._starting[self._describe(host)] = host.host_id
        return [host.host_id for host in hosts]

    def _describe(self, host: _ActorHost) -> Any:
        """Ask an actor for its facts, and let it go on to what its rank will need."""
        facts = host.actor.describe.remote()
        if self._prepares:
            host.actor.prepare.remote()
        return facts

    def open_store(self, hosts: Sequence[RankHost], secret: str) -> tuple[str, int]:
        """The leader's store; on loopback if the leader and all ranks share one."""
        leader: HostFacts = self._ray.get(self._leader.describe.remote(), timeout=self._config.start_timeout_s)
        is_local = {host.facts.network for host in hosts} == {leader.network}
        address = "127.0.0.1" if is_local else leader.address
        port = self._ray.get(self._leader.open_store.remote(address, secret), timeout=self._config.start_timeout_s)
        return address, int(port)

    # Ranks

    def start(self, host: _ActorHost, task: RankTask) -> None:
        """Run a rank in the actor."""
        if isinstance(task.work, EntryWork):
            self._scripts.add(host.host_id)
            if self._carried is not None and host.is_beside_code:
                variables = {"PYTHONPATH": self._carried.python_path, **task.variables}
                task = replace(task, variables=variables, work=replace(task.work, working_dir=self._carried.directory))
        self._running[host.actor.run.remote(task, self._leader)] = host.host_id

    def post(self, host_ids: Sequence[int], message: Mapping[str, Any]) -> None:
        """Send a message to ranks."""
        self._leader.post.remote(list(host_ids), dict(message))

    def kill(self, host: _ActorHost) -> None:
        """End an actor, and a script with it."""
        if self._hosts.pop(host.host_id, None) is not None and host.bundle is not None:
            self._free_bundles.append(host.bundle)
        self._ray.kill(host.actor, no_restart=True)

    def next_news(self, timeout_s: float) -> HostNews | None:
        """See `HostPool`."""
        if not self._news:
            self._collect(timeout_s)
        return self._news.popleft() if self._news else None

    def _collect(self, timeout_s: float) -> None:
        refs = [self._inbox, *self._running, *self._starting]
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=max(0.0, timeout_s), fetch_local=True)
        for ref in ready:
            if ref == self._inbox:
                self._take_inbox()
            elif ref in self._running:
                host_id = self._running.pop(ref)
                self._news.append(RankEnded(host_id, self._outcome(ref)))
            else:
                self._take_started(self._starting.pop(ref), ref)

    def _take_inbox(self) -> None:
        try:
            messages = self._ray.get(self._inbox)
        except self._ray.exceptions.RayError as error:
            raise ProcessFailure(
                "the actor that serves the job's store is lost",
                hint="its node is gone; start the job again",
                operation="store",
                reason=_first_lines(error),
            ) from error
        self._inbox = self._leader.take.remote()
        for kind, host_id, content in messages:
            self._news.append(SizeWanted(int(content)) if kind == "scale" else RankSaid(host_id, content))

    def _take_started(self, host_id: int, ref: Any) -> None:
        host = self._hosts.get(host_id)
        if host is None:
            return
        try:
            host.facts = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._news.append(HostUnavailable(host_id, _first_lines(error)))
        else:
            self._news.append(HostReady(host))

    def _outcome(self, ref: Any) -> RankOutcome:
        exceptions = self._ray.exceptions
        try:
            outcome: RankOutcome = self._ray.get(ref)
        except (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.OutOfMemoryError) as error:
            return RankOutcome(
                failure=RankFailure(
                    kind="the actor is lost", message=_first_lines(error), exit_code=137, is_host_lost=True
                )
            )
        except exceptions.RayTaskError as error:
            # The rank's own exceptions are in its outcome: this one is about what it returned.
            return RankOutcome(failure=RankFailure(kind=type(error).__name__, message=str(error)))
        return outcome

    def release(self) -> None:
        """See `HostPool`. Scripts are told to end first, so that they can save."""
        running = set(self._running.values())
        scripts = [host_id for host_id in running & self._scripts if host_id in self._hosts]
        if scripts and self._leader is not None:
            self.post(scripts, {"type": "abort", "reason": "the job ends"})
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_SCRIPT_END_S)
        for host in list(self._hosts.values()):
            self.kill(host)
        if self._running:
            # A killed actor's result fails as soon as its process is gone.
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_KILL_S)
        self._running, self._starting, self._scripts, self._free_bundles = {}, {}, set(), []
        self._news.clear()
        if self._leader is not None:
            self._ray.kill(self._leader, no_restart=True)
            self._leader = self._inbox = None
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None


def _first_lines(error: BaseException) -> str:
    """What Ray says about an error, without its advertisement for its own tools."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6])[:600]


R = TypeVar("R")


def run_training(
    function: Callable[..., R],
    *,
    num_workers: int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: RayConfig | None = None,
    name: str | None = None,
    max_restarts: int = 0,
    elastic: ElasticSpec | None = None,
    env: Mapping[str, str] | None = None,
    time_limit_s: float | None = None,
    on_report: ReportSink | None = None,
) -> list[R]:
    """Call `function(*args, **kwargs)` on `num_workers` actors; returns their results by rank.

    Each finds its rank in the environment, as under `torsh run`: `td.init()` and everything after it are the same.
    Ranks of one node share memory. If a rank or its node is lost, an `elastic` job goes on in place; otherwise, and
    `max_restarts` times, all start again, and the Engine goes on from its last checkpoint. Raises ProcessFailure with
    the rank's traceback if the job fails. Either way no actor is left. `on_report` takes what rank 0 says by `report`.
    """
    chosen = config or RayConfig()
    with connected(chosen.address) as ray:
        refuse_ray_client(ray)
        work = pack_function(function, args, dict(kwargs or {}), pickler="ray.cloudpickle")
        spec = HostedSpec(
            work=work,
            name=name or f"ray-{secrets.token_hex(4)}",
            num_workers=num_workers,
            max_restarts=max_restarts,
            elastic=elastic,
            variables=dict(env or {}),
            time_limit_s=time_limit_s,
            on_report=on_report,
        )
        return HostedJob(RayPool(ray, chosen, is_elastic=elastic is not None, prepares=True), spec).run()
