"""What the loss of each microbatch of a step is multiplied by, so the step is that of one process on the whole batch.

Gradients are averaged over the ranks. A rank's microbatch that counts c of the C labels, samples or values of the step,
on D ranks, weighs c * D / C. Counts known from the batch are added over the ranks before forward and read after it; on
a GPU the host does not wait for them. Counts that come with the loss are added between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.train.batches import Batch
from torsh_distributed.train.losses.loss_kind import (
    LossKind,
    MeanOfComputed,
    MeanOfSamples,
    SumOfSamples,
    WholeBatch,
    as_tensor,
)
from torsh_distributed.train.losses.watched_loss import ComputedCount

_counts_nothing: ContextVar[bool] = ContextVar("counts_nothing", default=False)


@contextmanager
def counting(*, is_borrowed: bool) -> Iterator[None]:
    """Around a loss: whether its samples count on another rank."""
    token = _counts_nothing.set(is_borrowed)
    try:
        yield
    finally:
        _counts_nothing.reset(token)


def global_mean(total: Tensor, count: Tensor | float, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of the mean of `total` over `count` on all ranks of `group`; every rank of it calls this.

    The mean of the results over the ranks is the mean of all: call backward on it under DDP or FSDP, which average
    gradients, and average it for a report. `total` keeps its graph. A rank that counts nothing adds nothing::

        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = td.global_mean(total, (labels != -100).sum())

    In a step of the Engine it is for losses with several means; set `training.loss_is = "global_mean"` with it. A rank
    that computes with a sample of another, because a batch has too few, counts nothing.
    """
    everyone = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach().clone()
    if _counts_nothing.get():
        total, everyone = total * 0.0, everyone * 0.0
    num_ranks = 1
    if dist.is_initialized():
        num_ranks = dist.get_world_size(group)
        everyone = all_reduce(everyone, group=group)
    return total * (num_ranks / everyone).to(total.dtype)


Weight = Tensor | float


@dataclass
class StepWeights:
    """The weights of one step's microbatches on this rank."""

    strategy: Strategy
    known: Sequence[Weight] | None
    """By microbatch; None where counts come with the losses."""
    num_pieces: int
    total: Tensor | None = None
    """C, once the ranks have added their counts; None where weights follow from the number of samples."""
    is_counted: bool = False
    """A batch of which nothing counts weighs 0: its loss must be a number all the same."""
    borrowed: Sequence[bool] = ()
    """By microbatch, whether it has no samples of its own: it computes with one that counts elsewhere."""
    is_exact: bool = True
    """Every rank has one microbatch: the counts are added before its backward. Otherwise the step is computed with
    `assumed` and corrected at its end, because backward of the first does not wait for forward of the last."""
    assumed: Tensor | None = None
    """An earlier step's C, equal on all ranks."""
    has_several: bool = False
    correction: Tensor | None = None
    """What gradients and loss are multiplied by at the end of the step; None: nothing."""
    _counts: list[ComputedCount] = field(default_factory=list)

    @property
    def usable_total(self) -> Tensor:
        """C, or what was assumed if nothing counted; once both are known."""
        assert self.total is not None, "the ranks have added their counts"
        assert self.assumed is not None, "counts come with the losses"
        return torch.where(self.total > 0, self.total, self.assumed)

    def is_borrowed(self, number: int) -> bool:
        """Whether the samples of microbatch `number` count elsewhere."""
        return number < len(self.borrowed) and self.borrowed[number]

    def before(self, number: int) -> Weight:
        """The weight of microbatch `number`, as far as it is known before its loss."""
        return 1.0 if self.known is None else self.known[number]

    def after(self, number: int, computed: ComputedCount | None) -> Weight:
        """The weight of microbatch `number`, whose loss is known; every rank calls this for each of its own."""
        if self.known is not None:
            return self.known[number]
        assert computed is not None, "the loss was watched"
        if self.is_borrowed(number):
            computed = ComputedCount(torch.zeros_like(computed.count), torch.zeros_like(computed.ratio))
        self._counts.append(computed)
        if self.assumed is None:
            added = self._added()
            # Where nothing counts any number will do: 0 of it are 0, as in one process, and steps may be corrected.
            added = torch.where(added > 0, added, 1.0)
            self.assumed = added if self.is_exact else added * self.num_pieces
        if self.is_exact:
            self.total = self.assumed
        elif number == self.num_pieces - 1:
            self.total = self._added()
            self.correction = self.assumed / self.usable_total
        return computed.count * self.strategy.num_sample_ranks / self.assumed

    def _added(self) -> Tensor:
        """The sum of counts over microbatches and ranks; ConfigurationError on every rank if one weight does not fit
        all means of the loss."""
        counts = torch.stack([one.count for one in self._counts])
        if not self.has_several:
            return self.strategy.sum_over_samples(counts.sum())
        ratios, is_counted = torch.stack([one.ratio for one in self._counts]), (counts > 0).double()
        parts = [counts, is_counted, ratios * is_counted, ratios.square() * is_counted]
        sums = self.strategy.sum_over_samples(torch.stack([part.sum() for part in parts]))
        number, ratio, square = (float(value) for value in sums[1:])
        if number * square - ratio**2 > 1e-6 * ratio**2:
            raise ConfigurationError(
                "the loss has several means, and they count different things in the parts of this batch: no weight of"
                " the parts gives the loss of the whole",
                hint="divide by the counts of all ranks with td.global_mean(sum, count) in the loss and set"
                ' training.loss_is = "global_mean", or set training.loss_is = "mean" to weigh samples alike',
                key="training.loss_is",
            )
        return sums[0]


def begin_step(
    strategy: Strategy,
    kind: LossKind,
    pieces: Sequence[tuple[Batch, float]],
    *,
    evenness: float | None,
    device: torch.device,
    is_exact: bool = True,
    before: StepWeights | None = None,
    is_again: bool = False,
) -> StepWeights:
    """The weights of `pieces`, this rank's microbatches with their shares of its samples; every rank calls this.

    A share of 0 is a sample that counts elsewhere. `evenness`: this rank's share of the samples over an equal share;
    None where only the ranks together know.
    `is_exact`: every rank has one piece. `before`: the weights of the last step, or, where this rank alone begins the
    same step again with smaller pieces, those: `is_again`.
    """
    ranks, borrowed = strategy.num_sample_ranks, [evenness == 0.0 or share == 0.0 for _, share in pieces]
    made = StepWeights(strategy, None, len(pieces), borrowed=borrowed, is_exact=is_exact)
    if isinstance(kind, MeanOfComputed):
        made.has_several = kind.has_several
        if before is not None and not is_exact:
            made.assumed = before.assumed if is_again or before.total is None else before.usable_total
        return made
    if isinstance(kind, WholeBatch):
        made.known = [1.0 / len(pieces)] * len(pieces)
    elif isinstance(kind, SumOfSamples):
        made.known = [0.0 if one else float(strategy.data_degree) for one in borrowed]
    elif isinstance(kind, MeanOfSamples) and (evenness is not None or strategy.data_degree == 1):
        made.known = [share * (1.0 if evenness is None else evenness) for _, share in pieces]
    else:
        counted = zip(pieces, borrowed, strict=True)
        counts = [as_tensor(0.0 if one else kind.count(piece), device) for (piece, _), one in counted]
        known_total = before.total if before is not None and is_again else None
        made.total = strategy.sum_over_samples(torch.stack(counts).sum()) if known_total is None else known_total
        made.known = [count * ranks / made.total for count in counts]
        made.is_counted = True
    return made
