"""The two exceptions that Horovod scripts catch."""

from __future__ import annotations

from typing import Any

from torsh_distributed.errors import InvalidArgument, TorshError


class HorovodInternalError(TorshError, RuntimeError):
    """An operation failed on every rank: ranks disagreed about it, one of them left, or the network failed.

    `hvd.elastic.run` restores the last commit and goes on. The tensors of the operation are invalid.
    """

    retryable = True
    advice = (
        "look at the first rank that failed; ranks that only waited report it too",
        "check that every rank submits an operation of this name, with the same shape, dtype and reduction",
        "wrap training in hvd.elastic.run to continue from the last commit",
        "start with `torsh run --max-restarts N` to restart the workers",
    )

    def __init__(self, message: str = "an operation failed", *, hint: str | None = None, **context: Any) -> None:
        super().__init__(message, hint=hint, **context)


class HostsUpdatedInterrupt(RuntimeError):
    """The members of the job changed; `hvd.elastic.run` catches it, joins the new world and goes on.

    `skip_sync`: ranks were only removed, so nobody needs the state of rank 0.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the members of the job changed")
        self.skip_sync = skip_sync


def not_initialized() -> InvalidArgument:
    """What every call before `init` raises. Programs search for the first sentence."""
    return InvalidArgument(
        "Horovod has not been initialized; use hvd.init().", hint="call hvd.init() once, before any other call"
    )
