"""A loss that also says what it is a mean of, where only its computation knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.models.kept_values import KeptValues
from torsh_distributed.parallel.models.probing import probing
from torsh_distributed.train.losses.loss_terms import LossTerm, LossTerms

_NEXT_TO_NOTHING = 1e-30


@dataclass(frozen=True)
class ComputedCount:
    """What a loss was a mean of."""

    count: Tensor
    """A scalar in fp64."""
    ratio: Tensor
    """How the counts of further means in the same loss compare with it; 0 if there are none. One weight fits all means
    only if it is the same everywhere."""


class WatchedLoss:
    """Calls a `loss_fn(outputs, targets)` that may return `(sum, count)`, and keeps the count of the last call.

    `watches`: torch's losses are watched, as long as `loss_fn` returns no count itself; without a loss_fn inside
    `watching()`, around the model's forward.
    """

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn
        self.watches = False
        self.returns_count = False
        self.terms: list[LossTerm] = []
        self.seen: tuple[Any, Any] | None = None
        """What it was called with last inside `untouched`."""
        self._only_looks = False
        self._noted = LossTerms()
        self._count: ComputedCount | None = None

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Calls inside only look: what a loss keeps between calls, such as running means, is as before afterwards."""
        self._only_looks = True
        try:
            with self.unchanged():
                yield
        finally:
            self.seen, self._only_looks = None, False

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around calls after which a loss has the state that it has now."""
        kept = KeptValues([self.loss_fn])
        try:
            with probing(self.loss_fn) if isinstance(self.loss_fn, nn.Module) else nullcontext():
                yield
        finally:
            kept.restore()

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss; of `(sum, count)` the mean, or 0 if nothing counts."""
        if self._only_looks:
            self.seen = outputs, targets
        with self._noting(self.watches):
            value = self.loss_fn(outputs, targets)
        if not isinstance(value, tuple):
            self._note_terms(value)
            if self._count is not None and isinstance(value, Tensor):
                # A mean over nothing is not a number; its weight is 0.
                value = torch.where(self._count.count > 0, value, torch.zeros_like(value))
            return value  # type: ignore[no-any-return]  # checked by loss_of
        total, count = _sum_and_count(value)
        self.returns_count = True
        self._count = ComputedCount(count, torch.zeros_like(count))
        return total / count.clamp(min=torch.finfo(torch.float32).tiny).to(total.dtype)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the forward of a model that computes its loss itself."""
        with self._noting(self.loss_fn is None and self.watches):
            yield
        if self.loss_fn is None:
            self._note_terms(None)

    @contextmanager
    def _noting(self, is_on: bool) -> Iterator[None]:
        self.terms = []
        if not is_on:
            yield
            return
        with LossTerms() as self._noted:
            yield
        self.terms = self._noted.terms

    def _note_terms(self, value: Any) -> None:
        if self.watches:
            self._count = _computed(self.terms, value)

    def note_count(self, count: Tensor) -> None:
        """What the last loss was a mean of: its parts were computed on another rank, or by themselves."""
        self._count = ComputedCount(count, torch.zeros_like(count))

    def take_part(self) -> Tensor:
        """What the loss of the part that ran last was a mean of, inside `watching()`."""
        if self.loss_fn is not None:
            return self.take_count().count
        terms = [*self._noted.terms]
        if not self._only_looks:  # else they are what it looks for
            self._noted.terms.clear()
        return _computed(terms, None if not terms else terms[0].result).count

    def take_count(self) -> ComputedCount:
        """What the last loss was a mean of."""
        count, self._count = self._count, None
        assert count is not None, "a loss was computed"
        return count


def _computed(terms: list[LossTerm], value: Any) -> ComputedCount:
    means = [term.count for term in terms if term.reduction == "mean"]
    if not means:
        # Such as when nothing was selected: it weighs nothing beside a mean; if no rank has one, all weigh the same.
        device = value.device if isinstance(value, Tensor) else None
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return ComputedCount(zero + _NEXT_TO_NOTHING, zero)
    first = means[0]
    others = [place * count for place, count in enumerate(means[1:], start=1)]
    ratio = torch.stack(others).sum() / first.clamp(min=1e-300) if others else torch.zeros_like(first)
    return ComputedCount(first, ratio)


def _sum_and_count(value: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    if (
        len(value) != 2
        or not isinstance(value[0], Tensor)
        or value[0].dim()
        or not isinstance(value[1], Tensor | int | float)
    ):
        raise InvalidArgument(
            "a loss_fn that returns a tuple must return (sum, count)",
            hint="return the sum of the losses as a tensor with one value, and how many there are",
            got=tuple(type(one).__name__ for one in value),
        )
    total = value[0]
    return total, torch.as_tensor(value[1], dtype=torch.float64, device=total.device).detach()
