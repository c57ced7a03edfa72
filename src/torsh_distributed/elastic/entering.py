"""From one world to the next: wait for the newest view that takes this worker in, and enter it, or the one after; or
leave, if it says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from torsh_distributed import known_variables
from torsh_distributed.elastic.membership_client import MembershipClient, WorldView
from torsh_distributed.errors import OperationTimeout, TorshError
from torsh_distributed.launch.worker.launcher_line import NEWS_VARIABLE

_log = logging.getLogger(__name__)


class WorldChanged(Exception):
    """A newer view has arrived: what was about to be done cannot succeed."""


def news_timeout_s() -> float:
    """How long a failed collective waits for word from the launcher, which notices a stopped process in half a second.

    Engines of others notice a lost node later, and say so in TORSH_NEWS_TIMEOUT_S.
    """
    return known_variables.number(NEWS_VARIABLE)


def enter_newest(client: MembershipClient, enter: Callable[[WorldView], None], *, timeout_s: float) -> None:
    """Enter the newest view by `enter`; the next one if that one fails. Raises OperationTimeout if none comes.

    A worker that is told to leave ends here, with exit code 0.
    """
    failed_epoch = client.current.epoch
    started_s = time.monotonic()
    while True:
        view = client.await_view(
            max(0.0, started_s + timeout_s - time.monotonic()),
            is_wanted=partial(_concerns, client.member, failed_epoch),
        )
        if view is None:
            raise OperationTimeout(
                f"no world took this worker in within {timeout_s:g} s",
                hint="raise elastic.scaling_timeout_s, or look at the launcher's output",
                operation="regroup",
                member=client.member,
            )
        if client.member in view.leaving:
            leave(client)
        try:
            enter(view)
            break
        except (TorshError, RuntimeError, WorldChanged) as error:
            _log.warning("epoch %d did not come up: %s", view.epoch, error)
            failed_epoch = view.epoch
            if client.newest.epoch == view.epoch:
                client.tell("stuck", epoch=view.epoch)
        finally:
            client.call_on_news(None)
    _log.info("in epoch %d after %.0f ms", view.epoch, (time.monotonic() - started_s) * 1e3)


def leave(client: MembershipClient) -> NoReturn:
    """Tell the launcher, and end."""
    client.tell("leaving", epoch=client.current.epoch)
    raise SystemExit(0)


def _concerns(member: int, after_epoch: int, view: WorldView) -> bool:
    entered = () if view.is_held else view.members
    return view.epoch > after_epoch and member in (*entered, *view.leaving)
