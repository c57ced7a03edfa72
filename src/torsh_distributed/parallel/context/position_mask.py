"""Which keys a query sees, told by positions in the whole sequence, so any block of the mask can be made anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
