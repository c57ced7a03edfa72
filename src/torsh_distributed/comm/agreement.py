"""All ranks agree or all ranks raise, so none enters a collective that another never reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torsh_distributed.comm.collectives.objects import all_gather_bytes, all_gather_object
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, ProcessFailure, TorshError


def require_same(
    settings: Mapping[str, Any],
    *,
    group: dist.ProcessGroup,
    what: str = "the ranks' settings",
    hint: str = "give every rank the same plan",
    except_for: Sequence[str] = (),
    part: str = "",
) -> list[dict[str, Any]]:
    """Raise ConfigurationError on every rank unless `settings` are equal on all, naming both sides; returns them all.

    Every rank of `group` calls it, with the same keys and plain values. Keys in `except_for` travel without being
    compared. If a setting is a mapping, only the entries that differ are shown. Where ranks hold different parts of
    something, those that name the same `part` are compared.
    """
    told: list[Any] = all_gather_object([part, dict(settings)], group=group)
    ranks = dist.get_process_group_ranks(group)
    for key in settings:
        if key in except_for:
            continue
        firsts: dict[str, tuple[int, Any]] = {}
        for rank, (theirs_part, theirs) in zip(ranks, told, strict=True):
            first_rank, first = firsts.setdefault(theirs_part, (rank, theirs[key]))
            other = theirs[key]
            if first != other:
                raise _difference(what, key, (first_rank, first), (rank, other), hint)
    return [theirs for _, theirs in told]


def require_as_on(
    rank: int, theirs: Mapping[str, Any], mine: Mapping[str, Any], *, own_rank: int, what: str, hint: str
) -> None:
    """Raise ConfigurationError on this rank unless its settings are those of `rank`; does not communicate."""
    for key in mine:
        if mine[key] != theirs[key]:
            raise _difference(what, key, (rank, theirs[key]), (own_rank, mine[key]), hint)


def _difference(what: str, key: str, one: tuple[int, Any], another: tuple[int, Any], hint: str) -> ConfigurationError:
    first, other = _only_differing(one[1], another[1])
    return ConfigurationError(
        f"{what} differ: rank {one[0]} has {key} {first}, rank {another[0]} has {other}", hint=hint, key=key
    )


def _only_differing(first: Any, other: Any) -> tuple[Any, Any]:
    if not (isinstance(first, Mapping) and isinstance(other, Mapping)):
        return first, other
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return {name: first.get(name) for name in names}, {name: other.get(name) for name in names}


@contextmanager
def fail_together(operation: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run the block; if any rank fails, every rank raises its own error or one that reports another rank's.

    Every rank of `group` enters. The block may contain collectives only if ranks fail in it alike, or after its last
    one. `operation` completes "rank 1 could not …".
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if group is None or group.size() == 1:
            raise
        failure = error
    if group is None or group.size() == 1:
        return
    _raise_if_any(failure, operation, group)


def exchange_or_fail(
    operation: str, group: dist.ProcessGroup | None, make: Callable[[], bytes], *, num_bytes: int
) -> list[bytes]:
    """What `make` returns on every rank, `num_bytes` each, by rank; if it raises on any, all raise as `fail_together`.

    One small collective, unless a rank fails. Every rank of `group` calls it; `make` does not communicate.
    """
    if group is None or group.size() == 1:
        return [make()]
    failure: Exception | None = None
    made = bytes(num_bytes)
    try:
        made = make()
    except Exception as error:
        failure = error
    answers = all_gather_bytes(bytes([failure is not None]) + made, group=group)
    if any(one[0] for one in answers):
        _raise_if_any(failure, operation, group)
    return [one[1:] for one in answers]


def _raise_if_any(failure: Exception | None, operation: str, group: dist.ProcessGroup) -> None:
    """Raise this rank's failure, or one that reports another rank's; nothing if there is none. Every rank calls it."""
    messages = all_gather_object(None if failure is None else _in_one_line(failure), group=group)
    if failure is not None:
        raise failure
    for position, message in enumerate(messages):
        if message is not None:
            rank = dist.get_global_rank(group, position)
            raise ProcessFailure(
                f"rank {rank} could not {operation}: {message}",
                hint="fix what that rank reports; this rank was ready",
                operation=operation,
                rank=rank,
            )


@contextmanager
def end_together(operation: str, group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Run a block in which ranks wait for each other's messages; a rank that raises ends the group, so none waits on.

    Unlike in `fail_together` ranks may fail anywhere, one alone or in the middle of a message. Its peers raise
    CommunicationError with the reason as soon as they wait for it, and the group refuses work from then on.
    `operation` completes "rank 1 could not …".
    """
    try:
        yield group
    except Exception as error:
        try:
            abort(f"could not {operation}: {_in_one_line(error).strip().splitlines()[0]}", group=group)
        except FeatureNotAvailable as unknown:
            error.add_note(f"Other ranks may wait until their timeout: {unknown}")
        raise


def _in_one_line(failure: Exception) -> str:
    return failure.message if isinstance(failure, TorshError) else f"{type(failure).__name__}: {str(failure).strip()}"
