"""`hvd.elastic.run`: train, and train again from the last commit when an operation fails or the members change."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.horovod.basics import init, is_initialized, shutdown, size
from torsh_distributed.migrate.horovod.elastic.elastic_state import State
from torsh_distributed.migrate.horovod.elastic.job_members import members_of_job
from torsh_distributed.migrate.horovod.horovod_errors import HorovodInternalError, HostsUpdatedInterrupt

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
