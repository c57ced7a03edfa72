"""Which data can promise every sample once: data with indices in a repeatable order, and streams that can say where
they are. Others are refused by name.

Random transforms in loader workers as a function of seed, epoch and sample alone.
A worker's generators depend on how many samples it has made before, so a run that resumes in mid-epoch would transform
the rest differently.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from typing_extensions import override

from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument


class SeededSamples(Dataset[Any]):
    """A map-style dataset whose every sample is made with generators seeded for it. For loader workers."""

    def __init__(self, data: Dataset[Any], *, seed: int, epoch: int) -> None:
        self._data = data
        self._seed = seed
        self._epoch = epoch

    @override
    def __getitem__(self, index: int) -> Any:
        mixed = ((self._seed * 1_000_003 + self._epoch) * 1_000_003 + int(index)) % 2**63
        torch.manual_seed(mixed)
        random.seed(mixed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(mixed % 2**32)
        return self._data[index]

    def __getattr__(self, name: str) -> Any:
        # What worker_init_fn and the like look for is on the user's dataset.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_data"], name)


T = TypeVar("T")

OTHER_DATA_HINT = (
    "resume with the data that the checkpoint was saved with; to leave the epoch and go on with other data, call"
    " engine.ledger.next_epoch() after the load, or load with model_only=True"
)
"""What to do if the epoch in progress cannot be continued."""


END_OF_DATA = "end of the data"
"""The position after the last batch of an epoch: a stream that has begun again says that it is at its beginning."""


@runtime_checkable
class Positioned(Protocol):
    """A stream that can say where it is: plain values, equal on all ranks."""

    def state_dict(self) -> Mapping[str, Any]:
        """Where it is, after what it has given out."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter()` goes on there."""


def positioned(loader: Iterable[Any]) -> Positioned | None:
    """What says where this stream is: the loader itself, or the dataset that a DataLoader reads in this process."""
    if isinstance(loader, Positioned):
        return loader
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return None
    # In workers copies of the dataset read ahead; the one here does not move.
    is_here = loader.num_workers == 0
    return loader.dataset if is_here and isinstance(loader.dataset, Positioned) else None


def with_positions(batches: Iterable[T], stream: Positioned) -> Iterator[tuple[T, Any]]:
    """Each batch with where the stream stands after it. Reads one batch ahead: only then it is known to be the last."""
    waiting: tuple[T, Any] | None = None
    for batch in batches:
        if waiting is not None:
            yield waiting
        waiting = batch, copy.deepcopy(dict(stream.state_dict()))
    if waiting is not None:
        yield waiting[0], END_OF_DATA


def describe_data(loader: Iterable[Any], *, seed: int) -> dict[str, Any]:
    """What tells data from others: an epoch that began with some is not continued with others.

    Plain values; None where it is not known. The batch size is among them only where a position depends on it.
    """
    data = loader.dataset if isinstance(loader, DataLoader) else loader
    facts: dict[str, Any] = {"fingerprint": _fingerprint(data)}
    if isinstance(loader, DataLoader) and not isinstance(data, IterableDataset):
        sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        shuffled = f", training.seed {seed}" if isinstance(sampler, RandomSampler) else ""
        facts |= {"samples": length_of(data), "order": type(sampler).__name__ + shuffled}
    elif isinstance(loader, Positioned):
        facts["batch size"] = getattr(loader, "batch_size", None)
    return facts


SAME_DATA_HINT = "engine.batches cuts global batches: give every rank the same loader over the same data"


def describe_loader(loader: Iterable[Any], *, seed: int) -> dict[str, Any]:
    """The data and how a loader cuts them, to compare between ranks."""
    form: dict[str, Any] = {"loader": type(loader).__name__}
    if isinstance(loader, DataLoader):
        form |= {"batch size": loader.batch_size, "drop_last": loader.drop_last}
    elif isinstance(loader, Sequence):
        form["batches"] = len(loader)
    return {**describe_data(loader, seed=seed), **form}


def require_same_data(facts: Mapping[str, Any]) -> None:
    """Refuse loaders that differ between ranks: their shares would not be of the same batches. Every rank calls this.

    `facts`: of `describe_loader`.
    """
    if process_group.is_initialized() and process_group.world_size() > 1:
        require_same({"data": dict(facts)}, group=resolve_group(None), hint=SAME_DATA_HINT)


def length_of(data: Any) -> int | None:
    """How many entries data or a loader have; None if they do not tell."""
    try:
        return len(data)
    except TypeError:
        return None


def _fingerprint(data: Any) -> str | None:
    """The dataset's own: `fingerprint`, or `_fingerprint` as Hugging Face's datasets have it."""
    for name in ("fingerprint", "_fingerprint"):
        found = getattr(data, name, None)
        if isinstance(found, str | int):
            return str(found)
    return None


def begin_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tell a loader, its sampler or its dataset the epoch, if it wants to know: the order may depend on it."""
    parts: list[Any] = [loader]
    if isinstance(loader, DataLoader):
        parts += [loader.batch_sampler, loader.sampler, loader.dataset]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def require_exactly_once(loader: Iterable[Any]) -> None:
    """Refuse a stream that cannot say where it is; data with indices are checked when their order is known."""
    if isinstance(loader, Sequence) or positioned(loader) is not None:
        return
    kind = type(loader).__name__
    hint = "give it state_dict() and load_state_dict(), or set training.exactly_once = false"
    if isinstance(loader, DataLoader):
        if not isinstance(loader.dataset, IterableDataset):
            return
        kind = f"{kind} over {type(loader.dataset).__name__}"
        if isinstance(loader.dataset, Positioned):
            hint = "read it with num_workers=0: copies in workers cannot say where they are"
    raise InvalidArgument(
        f"training.exactly_once: {kind} cannot say where it is, so a resumed run could repeat or lose samples",
        hint=hint,
        loader=kind,
    )


def require_one_order(
    batches: Sequence[Sequence[int]],
    again: Sequence[Sequence[int]],
    loader: DataLoader[Any],
    *,
    epoch: int,
    compares_ranks: bool,
) -> None:
    """Refuse an order that differs when asked again, or has a sample twice.

    With `compares_ranks` also one that differs between ranks; every rank calls this then.
    """
    name = type(loader.sampler if loader.batch_size is not None else loader.batch_sampler).__name__
    flat = [index for indices in batches for index in indices]
    problem = None
    if [list(one) for one in batches] != [list(one) for one in again]:
        problem = "gives another order each time it is asked"
    elif len(set(flat)) != len(flat):
        problem = "gives a sample more than once in an epoch"
    if problem is not None:
        raise InvalidArgument(
            f"training.exactly_once: {name} {problem}",
            hint="shuffle with DataLoader(shuffle=True), or make its order a function of set_epoch() alone",
            sampler=name,
            epoch=epoch,
        )
    if compares_ranks:
        require_same_order(batches, loader, epoch=epoch)


def require_same_order(batches: Sequence[Sequence[int]], loader: DataLoader[Any], *, epoch: int) -> None:
    """Refuse an order that differs between ranks: samples would be lost and repeated. Every rank calls this."""
    if not process_group.is_initialized() or process_group.world_size() == 1:
        return
    sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    is_divided = hasattr(sampler, "num_replicas")
    hint = "give it a sampler that is the same on all ranks"
    if is_divided:
        hint = f"leave {type(sampler).__name__} out"
    elif hasattr(sampler, "generator"):
        hint += ", with a generator that all ranks seed alike"
    require_same(
        {"order of samples": hashlib.blake2b(repr(batches).encode(), digest_size=8).hexdigest()},
        group=resolve_group(None),
        what=f"epoch {epoch} of {type(sampler).__name__}",
        hint=f"engine.batches cuts global batches and divides them among the ranks: {hint}",
    )
