"""The decisions about a job, on hosts that are objects of this process: a script of news instead of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from torsh_distributed.clusters.hosted.hosted_job import HostedJob, HostedSpec
from torsh_distributed.clusters.hosted.rank_host import (
    FunctionWork,
    HostFacts,
    HostNews,
    HostReady,
    RankEnded,
    RankFailure,
    RankHost,
    RankOutcome,
    RankSaid,
    RankTask,
    RoomFound,
    SizeWanted,
    own_facts,
)
from torsh_distributed.errors import InvalidArgument, OperationTimeout, ProcessFailure
from torsh_distributed.launch.spec import ElasticSpec

WORK = FunctionWork(packed=b"", pickler="pickle", name="nothing")
BROKEN = RankFailure(kind="ValueError", message="broken", traceback="Traceback of broken")
MISSED = RankFailure(kind="CommunicationError", message="a peer is gone", is_consequence=True)
LOST = RankFailure(kind="lost", message="", exit_code=137, is_host_lost=True)


@dataclass
class ScriptedHost:
    host_id: int
    facts: HostFacts
    tasks: list[RankTask] = field(default_factory=list)
    sent: list[Mapping[str, Any]] = field(default_factory=list)
    is_ended: bool = False

    def start(self, task: RankTask) -> None:
        self.tasks.append(task)

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    def end(self) -> None:
        self.is_ended = True


class ScriptedPool:
    """Gives out hosts, then the news of one attempt after another."""

    engine = "ray"

    def __init__(self, *attempts: Sequence[HostNews | Exception], nodes: Sequence[str] = ("x", "x")) -> None:
        self._attempts = deque(attempts)
        self._news: deque[HostNews | Exception] = deque()
        self._nodes = nodes
        self.hosts: dict[int, ScriptedHost] = {}
        self.num_released = 0
        self.num_requested = 0

    def _new(self, node: str) -> ScriptedHost:
        number = len(self.hosts)
        facts = own_facts(f"host {number}")
        host = ScriptedHost(
            number,
            HostFacts(
                name=facts.name,
                node=node,
                network=facts.network,
                address=facts.address,
                pid=number,
                python=facts.python,
                torch=facts.torch,
                torsh=facts.torsh,
            ),
        )
        self.hosts[number] = host
        return host

    def gather(self, least: int, most: int) -> Sequence[RankHost]:
        self._news = deque(self._attempts.popleft())
        if self._news and isinstance(self._news[0], Exception):
            raise self._news.popleft()  # type: ignore[misc]
        return [self._new(node) for node in self._nodes]

    def request(self, count: int) -> Sequence[int]:
        self.num_requested += count
        return [self._new("x").host_id for _ in range(count)]

    def open_store(self, hosts: Sequence[RankHost], secret: str) -> tuple[str, int]:
        assert len(secret) == 64
        return "127.0.0.1", 4000

    def next_news(self, timeout_s: float) -> HostNews | None:
        if not self._news:
            return None
        news = self._news.popleft()
        assert not isinstance(news, Exception)
        return HostReady(self.hosts[news.host.host_id]) if isinstance(news, HostReady) else news

    def release(self) -> None:
        self.num_released += 1


def job(pool: ScriptedPool, **changes: Any) -> HostedJob:
    return HostedJob(pool, HostedSpec(work=WORK, name="job", num_workers=2, **changes))


def done(host_id: int, value: Any) -> RankEnded:
    return RankEnded(host_id, RankOutcome(value=value))


def failed(host_id: int, failure: RankFailure) -> RankEnded:
    return RankEnded(host_id, RankOutcome(failure=failure))


def said(host_id: int, what: str, **facts: Any) -> RankSaid:
    return RankSaid(host_id, {"type": "elastic", "what": what, **facts})


def test_results_come_by_rank_and_ranks_go_node_by_node() -> None:
    pool = ScriptedPool([done(2, "c"), done(0, "a"), done(1, "b")], nodes=("x", "y", "x"))
    assert job(pool).run() == ["a", "c", "b"]
    ranks = {number: host.tasks[0].variables for number, host in pool.hosts.items()}
    assert [ranks[number]["RANK"] for number in range(3)] == ["0", "2", "1"]
    assert [ranks[number]["LOCAL_RANK"] for number in range(3)] == ["0", "0", "1"]
    assert ranks[0]["TORSH_STORE"] == "tcp://127.0.0.1:4000"
    assert pool.num_released == 1
    secret = pool.hosts[0].tasks[0].secret
    assert secret not in str(ranks)
    assert secret not in repr(pool.hosts[0].tasks[0])


def test_the_rank_that_failed_by_itself_is_named_not_one_that_missed_it() -> None:
    pool = ScriptedPool([failed(0, MISSED), failed(1, BROKEN)])
    with pytest.raises(ProcessFailure, match="rank 1 on host 1 failed: ValueError: broken") as caught:
        job(pool).run()
    assert "Traceback of broken" in caught.value.__notes__[0]
    assert pool.num_released == 1


def test_an_attempt_that_fails_starts_again_with_its_number_and_another_secret() -> None:
    pool = ScriptedPool([failed(1, LOST)], [done(2, 1), done(3, 2)])
    assert job(pool, max_restarts=1).run() == [1, 2]
    first, second = pool.hosts[0].tasks[0], pool.hosts[2].tasks[0]
    assert second.variables["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert first.secret != second.secret
    assert pool.num_released == 2


def test_a_worker_lost_while_starting_counts_as_an_attempt() -> None:
    lost = ProcessFailure("a worker was lost while it started")
    pool = ScriptedPool([lost], [done(0, 1), done(1, 2)])
    assert job(pool, max_restarts=1).run() == [1, 2]
    with pytest.raises(ProcessFailure, match="while it started"):
        job(ScriptedPool([lost])).run()


def test_ranks_that_were_told_to_end_and_have_saved_are_not_started_again() -> None:
    saved = RankFailure(kind="exit code 75", message="", exit_code=75)
    pool = ScriptedPool([failed(0, saved)], [done(2, 1), done(3, 2)])
    with pytest.raises(ProcessFailure) as caught:
        job(pool, max_restarts=3).run()
    assert caught.value.context["exit_code"] == 75


def test_an_elastic_job_goes_on_with_the_others_and_takes_a_replacement_in() -> None:
    pool = ScriptedPool([])
    replacement = ScriptedHost(2, own_facts("later"))
    script: list[HostNews] = [
        said(0, "ready"),
        said(1, "ready"),
        failed(1, LOST),
        said(0, "entered", epoch=1),
        HostReady(replacement),
        said(2, "join"),
        said(0, "entered", epoch=2),
        said(2, "entered", epoch=2),
        done(0, "a"),
        done(2, "c"),
    ]
    pool = ScriptedPool(script)
    assert job(pool, elastic=ElasticSpec(min_workers=1, max_workers=2)).run() == ["a", "c"]
    views = [message for message in pool.hosts[0].sent if message["type"] == "view"]
    assert [(view["members"], view["is_urgent"]) for view in views] == [((0,), True), ((0, 2), False)]
    assert pool.hosts[1].is_ended
    assert pool.hosts[2].tasks[0].variables["TORSH_JOINS"] == "1"
    assert float(pool.hosts[0].tasks[0].variables["TORSH_NEWS_TIMEOUT_S"]) >= 60


def test_an_elastic_job_follows_the_size_that_is_wanted_within_its_limits() -> None:
    pool = ScriptedPool([said(0, "ready"), said(1, "ready"), SizeWanted(9), done(0, 1), done(1, 2)])
    assert job(pool, elastic=ElasticSpec(min_workers=1, max_workers=3)).run() == [1, 2]
    assert pool.num_requested == 1


def test_an_elastic_job_grows_into_room_and_does_not_shrink_for_want_of_it() -> None:
    """A worker that comes back is not free at once; the job that waits for it must not settle for fewer."""
    pool = ScriptedPool([said(0, "ready"), said(1, "ready"), RoomFound(1), RoomFound(3), done(0, 1), done(1, 2)])
    assert job(pool, elastic=ElasticSpec(min_workers=1, max_workers=3)).run() == [1, 2]
    assert pool.num_requested == 1
    assert not any(message["type"] == "view" for host in pool.hosts.values() for message in host.sent)


def test_what_ranks_print_and_report_arrives_although_they_have_ended() -> None:
    shown: list[str] = []
    reports: list[Mapping[str, Any]] = []
    pool = ScriptedPool(
        [
            done(0, None),
            done(1, None),
            RankSaid(1, {"type": "output", "line": "last words"}),
            RankSaid(0, {"type": "report", "metrics": {"loss": 1.0}, "checkpoint": None}),
        ]
    )
    job(pool, show=shown.append, on_report=lambda metrics, _: reports.append(metrics)).run()
    assert shown == ["[rank 1] last words"]
    assert reports == [{"loss": 1.0}]


def test_a_job_past_its_time_ends() -> None:
    pool = ScriptedPool([])
    with pytest.raises(OperationTimeout, match=r"did not end within its 0\.01 s"):
        job(pool, time_limit_s=0.01).run()
    assert pool.num_released == 1


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one worker"):
        HostedSpec(work=WORK, name="job", num_workers=0)
    with pytest.raises(InvalidArgument, match="starts with 4 workers, outside the 1 to 2"):
        HostedSpec(work=WORK, name="job", num_workers=4, elastic=ElasticSpec(min_workers=1, max_workers=2))
