"""Which keys a query sees, told by positions in the whole sequence, so any block of the mask can be made anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torsh_distributed.errors import TensorShapeMismatch


def chunks_of(length: int, *, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Start and stop of the chunks of positions that `rank` of `size` has, in a sequence of `length`.

    Two chunks, one from each end, if the length allows it: under a causal mask later positions attend to more, so
    chunks from both ends give every rank the same work. Otherwise one chunk.
    """
    if length % (2 * size) == 0:
        step = length // (2 * size)
        last = 2 * size - 1 - rank
        return (rank * step, (rank + 1) * step), (last * step, (last + 1) * step)
    if length % size == 0 and length:
        step = length // size
        return ((rank * step, (rank + 1) * step),)
    raise TensorShapeMismatch(
        f"mesh.cp {size}: a sequence of {length} does not split over {size} ranks",
        hint=f"make it a multiple of {2 * size}, which gives all ranks the same work",
        length=length,
    )


def take_positions(tensor: Tensor, dim: int, *, length: int, rank: int, size: int) -> Tensor:
    """A copy of the rank's positions along `dim`; positions beyond `length` are left out."""
    runs = [tensor.narrow(dim, start, stop - start) for start, stop in chunks_of(length, rank=rank, size=size)]
    return torch.cat(runs, dim=dim)


def positions_of(length: int, *, rank: int, size: int) -> Tensor:
    """The rank's positions, in the order it holds them."""
    return take_positions(torch.arange(length), 0, length=length, rank=rank, size=size)


Allowed = Callable[[Any, Any, Any, Any], Any]
"""From the indices of batch, head, query and key to whether the query sees the key; takes tensors that broadcast."""


@dataclass(frozen=True)
class PositionMask:
    """A mask over the whole sequence. Without any of its parts every query sees every key."""

    is_causal: bool = False
    """A query sees the keys at its own and earlier positions."""
    allowed: Allowed | None = None
    """A function of the positions alone, such as a sliding window; in addition to `is_causal`."""
    keys: Tensor | None = None
    """(batch, length): False for padding, which no query sees."""
    documents: Tensor | None = None
    """(batch, length): sequences packed into one row see only themselves."""

    @property
    def is_plain(self) -> bool:
        """Whether it is causal or nothing at all, which kernels have built in."""
        return self.allowed is None and self.keys is None and self.documents is None

    def hides_far_keys(self, length: int) -> bool:
        """Whether the last query does not see the first key, as under a sliding window."""
        if self.allowed is None:
            return False
        zero, last = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.full((1, 1, 1, 1), length - 1)
        return not bool(self.allowed(zero, zero, last, zero))

    def block(self, queries: slice, keys: slice, device: torch.device) -> Tensor | bool:
        """Which of these keys these queries see, (batch or 1, 1, queries, keys); True: all of them, False: none."""
        # On the CPU: whether a block is empty must not wait for a GPU.
        rows = torch.arange(queries.start, queries.stop)[None, None, :, None]
        columns = torch.arange(keys.start, keys.stop)[None, None, None, :]
        seen: Tensor | bool = True
        if self.is_causal and keys.stop - 1 > queries.start:
            seen = columns <= rows
        if self.allowed is not None:
            zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
            seen = self.allowed(zero, zero, rows, columns).expand(1, 1, rows.shape[2], columns.shape[3]) & seen
        if isinstance(seen, Tensor):
            if not bool(seen.any()):
                return False
            seen = True if bool(seen.all()) else seen.to(device)
        if self.keys is not None:
            seen = self.keys[:, None, None, keys].to(device) & seen
        if self.documents is not None:
            same = self.documents[:, None, queries, None] == self.documents[:, None, None, keys]
            seen = same.to(device) & seen
        return seen

    def rows(self, start: int, stop: int) -> PositionMask:
        """The same for some rows of the batch: a microbatch."""
        return PositionMask(
            self.is_causal,
            self.allowed,
            None if self.keys is None else self.keys[start:stop],
            None if self.documents is None else self.documents[start:stop],
        )


def holds_tensors(function: Callable[..., Any]) -> bool:
    """Whether a mask function depends on more than positions: values of a batch that it was made with."""
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(one, Tensor) and one.numel() > 1 for one in inner):
            return True
        if any(callable(one) and hasattr(one, "__closure__") and holds_tensors(one) for one in inner):
            return True
    return False


Form = Literal["auto", "ring", "ulysses"]

RING_FROM_LENGTH = 1024
"""The shortest sequence at which a ring was measured to be quicker under a window (`python -m benchmarks context`)."""


def choose_form(
    form: Form, *, heads: int, size: int, length: int, mask: PositionMask, dropout_p: float = 0.0
) -> Literal["ring", "ulysses"]:
    """The form for an attention of `heads` heads on a rank to `length` positions, over `size` ranks; equal on all.

    Exchanging heads is quicker at every length, unless the mask hides far keys: a ring skips blocks that are hidden.
    """
    if form != "auto":
        return form
    if heads % size:
        return "ring"
    skips = length >= RING_FROM_LENGTH and mask.hides_far_keys(length)
    return "ring" if skips and dropout_p == 0 else "ulysses"
