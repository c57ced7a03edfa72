"""Whether ranks read the same batches: looked at in the first batch of each epoch, and at the end of a stream."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torsh_distributed.comm.collectives.objects import all_gather_bytes, all_gather_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError

_log = logging.getLogger(__name__)

T = TypeVar("T")


def compare_first_batch(first: Any, *, epoch: int, part: int, is_whole: bool) -> None:
    """Refuse batches that differ where they may not. Every rank calls this; `first` is None if it has no batch.

    Ranks with the same `part` split one model and must get the same batch. `is_whole`: it is a stream's, which is
    divided among the ranks after this: at least a tensor of it must be the same on all, such as labels; random
    transforms may change the others.
    """
    if not process_group.is_initialized() or process_group.world_size() == 1:
        return
    whole, tensors = _digest(_plain_bytes(first)), sorted(_digest(one) for one in _telling(first))
    everyone: list[Any] = all_gather_object([part, whole, tensors])
    for rank, (other_part, other_whole, other_tensors) in enumerate(everyone):
        before = next(one for one, (their_part, _, _) in enumerate(everyone) if their_part == other_part)
        if everyone[before][1] != other_whole:
            raise ConfigurationError(
                f"the first batch of epoch {epoch} differs between rank {before} and rank {rank}, which compute one"
                " model together",
                hint="let random transforms draw from a generator that is seeded for the sample, such as by its index:"
                " ranks of mesh.tp, pp and cp must get the same values",
            )
        if not is_whole or other_whole == everyone[0][1]:
            continue
        said = (
            f"the first batch of epoch {epoch} differs between rank 0 and rank {rank}, and engine.batches divides the"
            " batches of a stream among the ranks: one that was divided before, or is shuffled differently, loses and"
            " repeats samples"
        )
        if other_tensors and everyone[0][2] and not set(other_tensors) & set(everyone[0][2]):
            raise ConfigurationError(
                said,
                hint="give every rank the whole stream in the same order: leave split_by_node, shard(…) and a rank's"
                " own seed out. If only random transforms differ, seed them for the sample, or put its index into the"
                " batch",
            )
        if process_group.rank() == 0:
            _log.warning("%s. Give every rank the whole stream in the same order; only random transforms may", said)
        return


def ending_together(batches: Iterable[T], *, epoch: int) -> Iterator[T]:
    """The batches of a stream that does not say how long it is; ConfigurationError on every rank if it ends on some.

    Every rank iterates. Otherwise a rank that has read all would wait for the others' next step for ever.
    """
    if not process_group.is_initialized() or process_group.world_size() == 1:
        yield from batches
        return
    stream, number = iter(batches), 0
    nothing = object()
    while True:
        batch: Any = next(stream, nothing)
        goes_on = [one != b"\0" for one in all_gather_bytes(b"\0" if batch is nothing else b"\1")]
        if all(goes_on):
            yield batch
            number += 1
        elif not any(goes_on):
            return
        else:
            raise ConfigurationError(
                f"epoch {epoch} has {number} batches on rank {goes_on.index(False)}, and more on rank"
                f" {goes_on.index(True)}",
                hint="give every rank the whole stream; engine.batches divides each of its batches among the ranks",
            )


def _telling(value: Any) -> Iterator[bytes]:
    """The contents of the tensors of a batch that have several values: masks of ones are the same in all batches."""
    if isinstance(value, Tensor):
        if value.numel() and bool((value != value.flatten()[0]).any()):
            yield _plain_bytes(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _telling(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _telling(one)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _plain_bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return b"".join(str(key).encode() + _plain_bytes(one) for key, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return b"".join(map(_plain_bytes, value))
    return str(value).encode() if isinstance(value, str | int | float | bool | None) else b""
