"""From one world to the next: views that work, that fail, that never come, and those that tell a worker to leave."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torsh_distributed.elastic.entering import enter_newest, news_timeout_s
from torsh_distributed.elastic.in_place import InPlaceRecovery
from torsh_distributed.elastic.membership_client import MembershipClient, WorldView
from torsh_distributed.errors import CommunicationError, OperationTimeout
from torsh_distributed.launch.worker.launcher_line import NEWS_VARIABLE
from torsh_distributed.plan import Plan


class Line:
    """The worker's end of a line, on which the test says what the launcher would."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.answers: dict[str, Callable[[], None]] = {}
        self._take: Callable[[dict[str, Any]], None] = lambda _: None

    def listen(self, kind: str, handler: Callable[[dict[str, Any]], None]) -> None:
        """Remember who listens."""
        assert kind == "view"
        self._take = handler

    def send(self, message: dict[str, Any]) -> bool:
        """Note it, and answer."""
        self.sent.append(message)
        self.answers.get(message["what"], lambda: None)()
        return True

    def say(self, epoch: int, *members: int, is_urgent: bool = False, leaving: tuple[int, ...] = ()) -> None:
        """The launcher sends a view."""
        self._take({"epoch": epoch, "members": members, "is_urgent": is_urgent, "leaving": leaving})


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def client(line: Line) -> MembershipClient:
    first = WorldView(0, (0, 1, 2), is_urgent=False)
    return MembershipClient(line, 1, joins=False, first=first)  # type: ignore[arg-type]  # a line by its methods


def test_a_view_that_fails_is_reported_and_the_next_one_is_entered(line: Line, client: MembershipClient) -> None:
    tried: list[int] = []

    def enter(view: WorldView) -> None:
        tried.append(view.epoch)
        if view.epoch == 1:
            raise CommunicationError("nobody came")

    line.say(1, 0, 1)
    line.answers = {"stuck": lambda: line.say(2, 1, 0)}
    enter_newest(client, enter, timeout_s=30)
    assert tried == [1, 2]
    assert [(one["what"], one["epoch"]) for one in line.sent] == [("stuck", 1)]


def test_views_without_this_worker_are_waited_out(line: Line, client: MembershipClient) -> None:
    line.say(1, 0, 2)
    with pytest.raises(OperationTimeout, match=r"no world took this worker in within 0\.05 s"):
        enter_newest(client, lambda _: pytest.fail("it is not in that world"), timeout_s=0.05)


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_worker_that_is_told_to_leave_ends_with_success(
    line: Line, client: MembershipClient, is_urgent: bool
) -> None:
    line.say(1, 0, 2, is_urgent=is_urgent, leaving=(1,))
    with pytest.raises(SystemExit) as ended:
        enter_newest(client, lambda _: pytest.fail("it leaves"), timeout_s=30)
    assert ended.value.code == 0
    assert line.sent[-1]["what"] == "leaving"


def test_a_failed_collective_waits_for_word_as_long_as_the_engine_of_others_needs(
    client: MembershipClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NEWS_VARIABLE, raising=False)
    assert news_timeout_s() == 15.0
    monkeypatch.setenv(NEWS_VARIABLE, "")
    assert news_timeout_s() == 15.0
    monkeypatch.setenv(NEWS_VARIABLE, "0.05")
    waited: list[float] = []
    wait = client.await_view

    def await_view(timeout_s: float, *, is_wanted: Callable[[WorldView], bool]) -> WorldView | None:
        waited.append(timeout_s)
        return wait(timeout_s, is_wanted=is_wanted)

    def step_once(_: object) -> float:
        raise CommunicationError("a peer is gone")

    monkeypatch.setattr(client, "await_view", await_view)
    engine: Any = SimpleNamespace(
        plan=Plan(), num_steps=0, num_skipped=0, step_once=step_once, strategy=None, update=None
    )
    recovery = InPlaceRecovery(engine, client)
    monkeypatch.setattr(recovery, "_has_agreed", True)  # there is no group to compare settings in
    with pytest.raises(CommunicationError, match="a peer is gone"):
        recovery.step(None)
    assert waited == [0.05]


def test_a_view_can_be_entered_only_after_the_groups_of_the_old_world_are_aborted(
    line: Line, client: MembershipClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[WorldView | None] = []

    def abort_all(_: str) -> None:
        seen.append(client.await_view(0.0, is_wanted=lambda _: True))
        assert client.is_interrupted

    monkeypatch.setattr("torsh_distributed.elastic.membership_client.abort_all", abort_all)
    line.say(1, 0, 1, is_urgent=True)
    assert seen == [None]
    assert client.await_view(0.0, is_wanted=lambda _: True) is client.newest
