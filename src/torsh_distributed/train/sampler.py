"""Samplers for plain loops: disjoint shares of an epoch that another number of ranks can resume.

`Engine.batches` shards whole batches and does not need them; they are for your own `DataLoader` with DDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from typing_extensions import override

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument


class DistributedSampler(Sampler[int]):
    """Every `num_replicas`-th index of an epoch's order, starting at this rank; each index belongs to one rank.

    The order depends only on `seed` and epoch and equals that of torch's sampler of the same name. Unlike there,
    nothing is repeated to even out the end: without `drop_last` the first ranks may get one index more. `state_dict`
    records how far all ranks together have come; after `load_state_dict` the rest is divided among any number of ranks.
    """

    def __init__(
        self,
        data: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._size = len(data)
        self._num_replicas = process_group.world_size() if num_replicas is None else num_replicas
        self._rank = process_group.rank() if rank is None else rank
        if not 0 <= self._rank < self._num_replicas:
            raise InvalidArgument(
                "rank must be at least 0 and below num_replicas",
                hint="leave both out to take them from the process group",
                rank=self._rank,
                num_replicas=self._num_replicas,
            )
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self.epoch = 0
        # Indices all ranks together had taken when this share began, and how many this rank has taken since.
        self._start = 0
        self._taken = 0

    def order(self) -> list[int]:
        """All indices of the current epoch, in the order in which ranks take them; equal on every rank."""
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return [int(index) for index in torch.randperm(self._size, generator=generator)]

    @override
    def __iter__(self) -> Iterator[int]:
        self._taken = 0  # an epoch can be iterated again, from where this share began
        order = self.order()
        for place in range(self._start + self._rank, self._stop(len(order)), self._num_replicas):
            self._taken += 1
            yield order[place]

    def __len__(self) -> int:
        left = self._stop(self._size) - self._start - self._rank
        return max(0, -(-left // self._num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch, which has its own order. Call it on every rank before each epoch."""
        if epoch != self.epoch:
            self._start = self._taken = 0
        self.epoch = epoch

    def state_dict(self, *, num_taken: int | None = None) -> dict[str, int]:
        """How far the epoch has come, equal on all ranks if they took equally many.

        `num_taken` is how many indices this rank has trained on since the last load or `set_epoch`. Left out, it is
        how many were handed out: right for a loader without workers, too many for one that fetches ahead.
        """
        taken = self._taken if num_taken is None else num_taken
        if not 0 <= taken <= self._taken:
            raise InvalidArgument(
                "num_taken must be between 0 and the number of indices handed out",
                num_taken=taken,
                handed_out=self._taken,
            )
        place = min(self._start + taken * self._num_replicas, self._size)
        return {"epoch": self.epoch, "place": place, "seed": self._seed, "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where all ranks together had stopped, with this sampler's own rank and number of replicas."""
        for key, mine in (("seed", self._seed), ("size", self._size)):
            if state[key] != mine:
                raise InvalidArgument(
                    f"the state is of a sampler with another {key}: it has another order",
                    hint="build the sampler over the same data with the same seed",
                    state=state[key],
                    sampler=mine,
                )
        self.epoch, self._start, self._taken = state["epoch"], state["place"], 0

    def _stop(self, size: int) -> int:
        """Where this share ends: at the end of the order, or after the last full round."""
        if not self._drop_last:
            return size
        return size - (size - self._start) % self._num_replicas


class DistributedSamplerWrapper(DistributedSampler):
    """The same for the indices of your own sampler, such as a weighted one.

    The sampler must give the same order on every rank, and the same order again for the same epoch: seed its generator
    equally on all ranks. Its `set_epoch` is called if it has one.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, Sized):
            raise InvalidArgument("the sampler must have a length", hint="define __len__", got=type(sampler).__name__)
        super().__init__(sampler, num_replicas=num_replicas, rank=rank, shuffle=False, drop_last=drop_last)
        self._sampler = sampler

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)

    @override
    def order(self) -> list[int]:
        return list(self._sampler)
