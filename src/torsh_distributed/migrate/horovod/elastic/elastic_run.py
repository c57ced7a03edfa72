"""`hvd.elastic.run`: train, and train again from the last commit when an operation fails or the members change."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.elastic.entering import enter_newest, news_timeout_s
from torsh_distributed.elastic.epoch_world import EpochWorld
from torsh_distributed.elastic.membership_client import MembershipClient, WorldView, open_membership
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.horovod.basics import init, is_initialized, shutdown, size
from torsh_distributed.migrate.horovod.elastic.elastic_state import State
from torsh_distributed.migrate.horovod.horovod_errors import HorovodInternalError, HostsUpdatedInterrupt
from torsh_distributed.migrate.horovod.world_state import is_up, world
from torsh_distributed.train.job_changes.elastic_steps import is_elastic_job

_ENTER_TIMEOUT_S = 300.0
"""As elastic.scaling_timeout_s of a plan."""
_NEWS_TIMEOUT_S = 30.0
"""How long a failed operation waits for word from the launcher, which says so itself if training may wait longer."""
_ADDED, _REMOVED = 0, 1


class JobMembers:
    """This worker among the members that the launcher keeps. Ranks are Horovod's in the world of the present view."""

    def __init__(self, client: MembershipClient) -> None:
        self._client = client
        self._world = EpochWorld(client.member)
        self._entered_epoch = client.current.epoch
        self._stepped_epoch = client.current.epoch
        self.has_newcomers = False
        """Whether the present world has members that were not in the one before: they need the state."""
        client.call_on_news(self._interrupt)
        client.tell("ready")

    def join(self) -> None:
        """In a worker that was started later: enter the running world, at a commit of the others."""
        if self._client.joins:
            self._client.tell("join")
            self._enter()

    def news(self) -> int | None:
        """At a commit: whether members come (0) or only go (1), for `State.on_hosts_updated`; None if they stay."""
        client = self._client
        if self._stepped_epoch != client.current.epoch:
            self._stepped_epoch = client.current.epoch
            client.tell("stepped", epoch=client.current.epoch, step=0)
        pending = client.pending
        if pending is None or pending.is_urgent:  # a loss ends the next operation by itself
            return None
        return _REMOVED if set(pending.members) <= set(client.current.members) else _ADDED

    def recover(self) -> bool:
        """After a failed operation: enter the world of the survivors. False if no member was lost."""
        if not self._client.is_interrupted:
            if not _has_ended():
                return False
            limit_s = max(_NEWS_TIMEOUT_S, news_timeout_s())
            if self._client.await_view(limit_s, is_wanted=lambda view: view.is_urgent) is None:
                return False
        self._enter()
        return True

    def follow(self) -> bool:
        """After all ranks have agreed that members change: enter the new world, or leave. False if none is there."""
        pending = self._client.await_view(_NEWS_TIMEOUT_S, is_wanted=lambda view: True)
        if pending is None:
            return False
        if self._client.member in pending.leaving:
            self._client.tell("leaving", epoch=self._client.current.epoch, step=0)
            shutdown()
            raise SystemExit(0)
        self._enter()
        return True

    def tell_entered(self) -> None:
        """The state is that of rank 0: this worker can go on when others are lost."""
        epoch = self._client.current.epoch
        if self._entered_epoch != epoch:
            self._entered_epoch = epoch
            self._client.tell("entered", epoch=epoch, step=0)

    def _enter(self) -> None:
        shutdown()
        before = set(self._client.current.members)
        # A world that is held because it is too small is entered once it has grown.
        enter_newest(self._client, self._enter_view, timeout_s=max(_ENTER_TIMEOUT_S, news_timeout_s()))
        self.has_newcomers = not set(self._client.current.members) <= before
        self._client.call_on_news(self._interrupt)
        self._interrupt()  # for a view that came in between

    def _interrupt(self) -> None:
        """A member is lost: fail what waits for it. Its links stay open if its host is cut off."""
        if self._client.is_interrupted and is_up():
            for one in world().sets.values():
                if one.engine is not None:
                    one.engine.interrupt("a member of the job is lost")

    def _enter_view(self, view: WorldView) -> None:
        client = self._client
        shutdown()
        client.call_on_news(self._world.cancel)
        self._world.enter(view, is_newest=lambda: client.newest.epoch == view.epoch, timeout_s=_ENTER_TIMEOUT_S)
        init()
        client.current, client.joins = view, False


_members: JobMembers | None = None


def members_of_job() -> JobMembers | None:
    """The members of the job that this worker belongs to; None if its number of workers is fixed."""
    global _members
    if _members is None and is_elastic_job():
        _members = JobMembers(open_membership(dist.get_world_size()))
    return _members


def _has_ended() -> bool:
    """Whether the failure ended more than one operation: ranks that disagree about one go on."""
    engine = world().sets[0].engine if is_up() else None
    return engine is not None and engine.failure is not None


_log = logging.getLogger(__name__)

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate `func(state, …)`: it is called with a state that is equal on all ranks, again after every failure.

    After HorovodInternalError the state goes back to the last commit; after HostsUpdatedInterrupt it stays as it is.
    Either way the ranks meet again, reset callbacks run, and the state of rank 0 goes to all. In a job that was started
    with `--min-np`, `--max-np` or `--elastic` ranks come and go meanwhile: survivors keep their process, and a worker
    that was started later enters at a commit.
    """
    return run_fn(func, reset_horovod)


def run_fn(func: Callable[..., R], reset: Callable[[], None]) -> Callable[..., R]:
    """`run` with another way for the ranks to meet again."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if not is_initialized():
            init()
        state.load_commit()
        members = members_of_job()
        if members is not None:
            state.watch(members.news)
            members.join()
        must_sync, num_resets, limit = True, 0, _reset_limit()
        while True:
            is_moved = False
            try:
                if must_sync:
                    state.sync()
                if members is not None:
                    members.tell_entered()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if limit is not None and num_resets >= limit:
                    raise
                _note(f"restoring the last commit after: {error.message}")
                is_moved = members is not None and members.recover()
                state.restore()
                must_sync = True
            except HostsUpdatedInterrupt as interrupt:
                if limit is not None and num_resets >= limit:
                    raise
                _note("the members of the job changed")
                state.agree()  # while those that leave are still there
                is_moved = members is not None and members.follow()
                # The world that is entered may be a newer one than the interrupt told of.
                must_sync = not interrupt.skip_sync or (members is not None and members.has_newcomers)
            num_resets += 1
            if not is_moved:
                reset()
            events.emit(events.MembershipEvent(action="recovered", world_size=size(), detail="hvd.elastic.run"))
            state.on_reset()

    return wrapper


def reset_horovod() -> None:
    """Leave and join again, with the ranks that are there."""
    shutdown()
    init()


def _note(text: str) -> None:
    _log.warning(text)
    events.emit(events.LogEvent(level="warning", message=f"hvd.elastic: {text}"))


def _reset_limit() -> int | None:
    text = os.environ.get("HOROVOD_RESET_LIMIT")
    if not text:
        return None
    if not text.isdigit():
        raise ConfigurationError("HOROVOD_RESET_LIMIT must be a number", hint="unset it", got=text)
    return int(text)
