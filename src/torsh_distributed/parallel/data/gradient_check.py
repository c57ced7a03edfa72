"""Checks whether all ranks hold the same gradients, and which ranks differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_gather


@dataclass(frozen=True)
class GradientDifference:
    """A parameter whose gradient is not the same on all ranks."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the world that differ from the most common value, or from the first rank's if there is none."""

    @override
    def __str__(self) -> str:
        return f"{self.name} on rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"


def gradient_differences(named: Mapping[str, Tensor | None], group: dist.ProcessGroup) -> list[GradientDifference]:
    """Compare gradients bit by bit over the ranks, by hash; every rank calls this with the same names in order.

    A missing gradient counts as a value too. All ranks get the same answer. Costs one pass over the gradients and
    sends eight bytes per parameter.
    """
    if not named:
        return []
    device = next((value.device for value in named.values() if value is not None), torch.device("cpu"))
    hashes = torch.tensor([_hash(value) for value in named.values()], dtype=torch.int64, device=device)
    by_rank = [row.tolist() for row in all_gather(hashes, group=group)]
    ranks = dist.get_process_group_ranks(group)
    found = []
    for name, values in zip(named, zip(*by_rank, strict=True), strict=True):
        odd = _odd_ones(values, ranks)
        if odd:
            found.append(GradientDifference(name, odd))
    return found


def _odd_ones(values: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    common, count = Counter(values).most_common(1)[0]
    usual = common if count > 1 else values[0]
    return tuple(rank for rank, value in zip(ranks, values, strict=True) if value != usual)


def _hash(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    data = gradient.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
