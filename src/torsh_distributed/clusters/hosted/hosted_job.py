"""A job whose ranks run in an engine's processes: ranks are given out, watched, replaced, restarted.

The same for every engine. An attempt gathers hosts, checks that they fit, opens a store with a secret of its own and
starts the ranks all at once. If a rank is lost, an elastic job goes on in place by the rules of `torsh run --elastic`
(`launch.control.membership`); any other, or one that cannot, starts again from its last checkpoint, as often as it may.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.clusters.hosted.rank_host import (
    HostNews,
    HostPool,
    HostReady,
    HostUnavailable,
    RankEnded,
    RankFailure,
    RankHost,
    RankOutcome,
    RankSaid,
    RankTask,
    RoomFound,
    SizeWanted,
    Work,
    own_facts,
    require_fitting,
    visible_gpus,
)
from torsh_distributed.clusters.hosted.rank_variables import (
    HostedEndpoint,
    joining_place,
    order_by_node,
    places_on,
    rank_variables,
    sweep_rank_folders,
)
from torsh_distributed.clusters.hosted.reporting import ReportSink
from torsh_distributed.comm.trust.job_secret import new_secret
from torsh_distributed.errors import InvalidArgument, OperationTimeout, ProcessFailure
from torsh_distributed.launch.control.membership import (
    CannotContinue,
    Membership,
    MembershipDecision,
    NewView,
    StartMembers,
)
from torsh_distributed.launch.local.exit_causes import SAVED_EXIT_CODE
from torsh_distributed.launch.spec import ElasticSpec

_log = logging.getLogger(__name__)

_CAUSE_WAIT_S = 2.0
"""How long a rank that blames others waits for their own word."""
_QUIET_S = 1.0
_DRAIN_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedSpec:
    """A job as the user asked for it."""

    work: Work
    name: str
    num_workers: int
    max_restarts: int = 0
    elastic: ElasticSpec | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """The user's own variables of the ranks."""
    time_limit_s: float | None = None
    show: Callable[[str], None] | None = None
    """Takes the lines that scripts print, each with its rank before it."""
    on_report: ReportSink | None = None
    """Takes what rank 0 reports."""

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.max_restarts < 0:
            raise InvalidArgument(
                "a job needs at least one worker, and max_restarts must not be negative",
                num_workers=self.num_workers,
                max_restarts=self.max_restarts,
            )
        elastic = self.elastic
        if elastic is not None and not elastic.min_workers <= self.num_workers <= elastic.max_workers:
            raise InvalidArgument(
                f"the job starts with {self.num_workers} workers, outside the {elastic.min_workers} to "
                f"{elastic.max_workers} that it may have",
                hint="change num_workers, or the limits in ElasticSpec",
            )


class HostedJob:
    """One job on one engine's hosts. `run` blocks until it ends; nothing of it is left then."""

    def __init__(self, pool: HostPool, spec: HostedSpec) -> None:
        self._pool = pool
        self._spec = spec
        self._deadline_s = float("inf") if spec.time_limit_s is None else time.monotonic() + spec.time_limit_s

    def run(self) -> list[Any]:
        """What the ranks returned, by rank. Raises ProcessFailure, from the first cause, if they did not succeed."""
        spec = self._spec
        for attempt in range(spec.max_restarts + 1):
            try:
                return self._attempt(attempt)
            except _AttemptFailed as failed:
                lost = failed.failure
                if attempt == spec.max_restarts or lost.exit_code == SAVED_EXIT_CODE:
                    raise self._error(failed, attempt) from lost.error
                _log.warning(
                    "%s: %s failed: %s; restart %d of %d",
                    spec.name,
                    failed.who,
                    lost.summary,
                    attempt + 1,
                    spec.max_restarts,
                )
            except ProcessFailure as lost_at_start:
                if attempt == spec.max_restarts:
                    raise
                _log.warning(
                    "%s: %s; restart %d of %d", spec.name, lost_at_start.message, attempt + 1, spec.max_restarts
                )
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, attempt: int) -> list[Any]:
        spec = self._spec
        least = spec.num_workers if spec.elastic is None else spec.elastic.min_workers
        try:
            found = list(self._pool.gather(least, spec.num_workers))
            hosts = [found[index] for index in order_by_node([host.facts.node for host in found])]
            require_fitting([host.facts for host in hosts], own_facts("this program"), engine=self._pool.engine)
            secret = new_secret()
            address, port = self._pool.open_store(hosts, secret)
            endpoint = HostedEndpoint(
                engine=self._pool.engine,
                name=spec.name,
                attempt=attempt,
                max_restarts=spec.max_restarts,
                master_addr=address,
                master_port=port,
                elastic=spec.elastic,
            )
            return _Attempt(self._pool, spec, endpoint, hosts, secret, self._deadline_s).run()
        finally:
            self._pool.release()
            sweep_rank_folders()  # of the ranks here that had to be killed

    def _error(self, failed: _AttemptFailed, attempt: int) -> ProcessFailure:
        lost = failed.failure
        error = ProcessFailure(
            f"{failed.who} failed: {lost.summary}",
            hint="the traceback below is the rank's own" if lost.traceback else "look at the engine's log of the host",
            operation=self._spec.name,
            rank=failed.rank,
            host=failed.host,
            exit_code=lost.exit_code,
            attempts=attempt + 1,
        )
        if lost.traceback:
            error.add_note(f"on {failed.who}:\n{lost.traceback.rstrip()}")
        return error


class _AttemptFailed(Exception):
    """The ranks of an attempt cannot go on; `failure` is the first cause."""

    def __init__(self, failure: RankFailure, *, rank: int, host: str) -> None:
        super().__init__(failure.summary)
        self.failure = failure
        self.rank = rank
        self.host = host

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}"


class _Attempt:
    """The ranks of one attempt: members by their number, each on its host."""

    def __init__(
        self,
        pool: HostPool,
        spec: HostedSpec,
        endpoint: HostedEndpoint,
        hosts: Sequence[RankHost],
        secret: str,
        deadline_s: float,
    ) -> None:
        self._pool = pool
        self._spec = spec
        self._endpoint = endpoint
        self._secret = secret
        self._deadline_s = deadline_s
        self._hosts = dict(enumerate(hosts))
        self._member_of = {host.host_id: member for member, host in self._hosts.items()}
        self._awaited: dict[int, int] = {}
        """Members whose host was asked for and is not there yet, by the host's number."""
        self._results: dict[int, Any] = {}
        self._failures: list[tuple[int, RankFailure]] = []
        self._membership = Membership(range(len(hosts)), spec.elastic) if spec.elastic is not None else None
        self._short_since_s: float | None = None
        self._strays: set[int] = set()

    def run(self) -> list[Any]:
        """Start all ranks; return what they returned when all have ended."""
        nodes = [host.facts.node for host in self._hosts.values()]
        facts = [host.facts for host in self._hosts.values()]
        for place, (member, host) in zip(places_on(nodes), list(self._hosts.items()), strict=True):
            variables = rank_variables(place, self._endpoint, member=member)
            gpus = visible_gpus(facts, place.rank)
            if gpus is not None:
                variables["CUDA_VISIBLE_DEVICES"] = gpus
            self._start(host, member, variables)
        while not self._is_complete():
            self._check_time()
            news = self._pool.next_news(_QUIET_S)
            if news is not None:
                self._take(news)
        self._drain()
        return [self._results.get(member) for member in self._members]

    def _start(self, host: RankHost, member: int, variables: dict[str, str]) -> None:
        host.start(
            RankTask(
                member=member,
                variables={**variables, **self._spec.variables},
                secret=self._secret,
                work=self._spec.work,
                has_line=self._membership is not None,
            )
        )

    @property
    def _members(self) -> list[int]:
        if self._membership is None:
            return list(self._hosts)
        return [member for member in self._membership.members if member not in self._strays]

    def _is_complete(self) -> bool:
        return all(member in self._results for member in self._members)

    def _check_time(self) -> None:
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            raise OperationTimeout(
                f"the job did not end within its {self._spec.time_limit_s:g} s",
                hint="raise the time limit, or start it again: it goes on from its last checkpoint",
                operation=self._spec.name,
            )
        membership, elastic = self._membership, self._spec.elastic
        if membership is None or elastic is None or not membership.is_short:
            self._short_since_s = None
        elif self._short_since_s is None:
            self._short_since_s = now_s
        elif now_s - self._short_since_s > elastic.wait_timeout_s:
            self._give_up()

    def _take(self, news: HostNews) -> None:
        match news:
            case RankEnded():
                member = self._member_of.get(news.host_id)
                if member is not None and member not in self._strays:
                    self._ended(member, news.outcome)
            case RankSaid():
                member = self._member_of.get(news.host_id)
                if member is not None and news.message.get("type") == "output":
                    self._show(member, str(news.message["line"]))
                elif member is not None and news.message.get("type") == "report":
                    if self._spec.on_report is not None:
                        self._spec.on_report(news.message["metrics"], news.message["checkpoint"])
                elif member is not None and self._membership is not None:
                    self._said(self._membership, member, news.message)
            case HostReady():
                self._join(news.host)
            case HostUnavailable():
                member = self._awaited.pop(news.host_id, None)
                if member is not None and self._membership is not None:
                    _log.warning("%s: no host for another worker: %s", self._spec.name, news.reason)
                    self._carry_out(self._membership.lost([member]))
            case SizeWanted():
                self._scale(news.workers)
            case RoomFound():
                if self._membership is not None and news.workers > self._membership.target:
                    self._scale(news.workers)

    def _show(self, member: int, line: str) -> None:
        if self._spec.show is not None:
            self._spec.show(f"[rank {member}] {line}")

    def _drain(self) -> None:
        """Show what ranks printed before they ended: it travels beside the news of their end."""
        while isinstance(news := self._pool.next_news(_DRAIN_S), RankSaid | RankEnded):
            if isinstance(news, RankSaid) and news.message.get("type") in ("output", "report"):
                self._take(news)

    # A rank's end

    def _ended(self, member: int, outcome: RankOutcome) -> None:
        failure = outcome.failure
        if failure is None:
            self._results[member] = outcome.value
            if self._membership is not None:
                self._membership.finished(member)
                self._end_strays()
            return
        self._failures.append((member, failure))
        host = self._hosts[member]
        if self._membership is not None:
            decisions = self._membership.lost([member])
            obstacle = next((one.reason for one in decisions if isinstance(one, CannotContinue)), None)
            if obstacle is None:
                _log.warning("%s: worker %d is lost: %s", self._spec.name, member, failure.summary)
                host.end()
                self._carry_out(decisions)
                return
            _log.warning("%s: not in place: %s", self._spec.name, obstacle)
        self._give_up()

    def _give_up(self) -> None:
        """End the attempt with the first cause: the rank that failed by itself, not one that misses another."""
        wait_until_s = time.monotonic() + _CAUSE_WAIT_S
        while all(failure.is_consequence for _, failure in self._failures):
            left_s = wait_until_s - time.monotonic()
            news = self._pool.next_news(left_s) if left_s > 0 else None
            if left_s <= 0:
                break
            if isinstance(news, RankEnded) and news.outcome.failure is not None and news.host_id in self._member_of:
                self._failures.append((self._member_of[news.host_id], news.outcome.failure))
            elif isinstance(news, RankSaid):
                self._take(news)
        self._drain()
        member, failure = next((one for one in self._failures if not one[1].is_consequence), self._failures[0])
        raise _AttemptFailed(failure, rank=member, host=self._hosts[member].facts.name)

    # An elastic job

    def _said(self, membership: Membership, member: int, message: Mapping[str, Any]) -> None:
        """A rank tells where it is; see `elastic.in_place`."""
        match message.get("what"):
            case "ready":
                membership.ready(member, message.get("detail") or None)
            case "join":
                self._carry_out(membership.wants_in(member))
            case "entered":
                self._carry_out(membership.entered(member, int(message["epoch"])))
            case "stepped":
                _log.info("%s: %d workers from step %s", self._spec.name, len(membership.members), message.get("step"))
            case "stuck":
                self._carry_out(membership.stuck(int(message["epoch"])))
            case "scale":
                if member in membership.members[:1]:  # rank 0 speaks for all
                    self._scale(int(message["workers"]))

    def _scale(self, workers: int) -> None:
        membership, elastic = self._membership, self._spec.elastic
        if membership is None or elastic is None:
            return
        target = max(elastic.min_workers, min(workers, elastic.max_workers))
        if target != membership.target:
            _log.warning("%s: %d workers are wanted now", self._spec.name, target)
            self._carry_out(membership.scale(target))

    def _carry_out(self, decisions: Sequence[MembershipDecision]) -> None:
        for decision in decisions:
            match decision:
                case NewView():
                    self._tell(decision)
                case StartMembers():
                    numbers = self._pool.request(len(decision.members))
                    self._awaited.update(zip(numbers, decision.members, strict=True))
                case CannotContinue():
                    _log.warning("%s: not in place: %s", self._spec.name, decision.reason)
                    self._give_up()

    def _tell(self, view: NewView) -> None:
        """Every member that runs learns who is in the world now."""
        message = {
            "type": "view",
            "epoch": view.epoch,
            "members": view.members,
            "is_urgent": view.is_urgent,
            "leaving": view.leaving,
        }
        for member in dict.fromkeys([*view.members, *view.leaving]):
            if member not in self._results:
                self._hosts[member].send(message)

    def _join(self, host: RankHost) -> None:
        """A host that was asked for is there: its rank starts alone and asks to be let in."""
        member = self._awaited.pop(host.host_id, None)
        if member is None:
            host.end()
            return
        running = [self._hosts[one].facts.node for one in self._members if one in self._hosts]
        place = joining_place(member, host.facts.node, running)
        self._hosts[member] = host
        self._member_of[host.host_id] = member
        variables = rank_variables(place, self._endpoint, member=member, joins=True)
        if host.facts.gpus:
            # Alone on its own devices: those of the others were chosen before it came.
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(host.facts.gpus)
            variables["LOCAL_RANK"] = "0"
            variables["LOCAL_WORLD_SIZE"] = "1"
        self._start(host, member, variables)

    def _end_strays(self) -> None:
        """Workers that came too late: all that could let them in have finished."""
        assert self._membership is not None, "only an elastic job has strays"
        for member in set(self._membership.strays) - self._strays:
            self._strays.add(member)
            if member in self._hosts and member not in self._results:
                self._hosts[member].end()
