"""The optimizer update in progress, and what it takes to happen: a finite loss, and a finite gradient, clipped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import NonFiniteLoss
from torsh_distributed.parallel.mesh.mesh_reduction import HostValue
from torsh_distributed.parallel.strategy import PendingNumber, Strategy
from torsh_distributed.train.batches import Batch
from torsh_distributed.train.losses.step_weights import StepWeights
from torsh_distributed.train.precision import decides_on_device, only_if_finite


@dataclass
class Update:
    """The optimizer update in progress: what its microbatches have produced so far."""

    started: float = field(default_factory=time.monotonic)
    losses: list[Tensor] = field(default_factory=list)
    mean: PendingNumber | None = None
    """The loss over all ranks, on its way since the last backward began."""
    num_samples: int | None = None
    batch: Batch = None
    """What the update began with."""
    pieces: Sequence[tuple[Batch, float]] = ()
    """Its microbatches, with their shares of this rank's samples."""
    is_again: bool = False
    """This rank alone began it once more, with smaller microbatches."""
    weights: StepWeights | None = None
    """What the losses of its microbatches are multiplied by, from the first forward on."""
    number: int = 0
    """The current microbatch."""
    is_last: bool = True

    @property
    def loss(self) -> Tensor:
        """This rank's loss so far."""
        total = self.losses[0] if len(self.losses) == 1 else torch.stack(self.losses).sum()
        correction = None if self.weights is None else self.weights.correction
        return total if correction is None else total * correction


class GradientNorm:
    """Around each update: measures the norm of the whole gradient, clips, and prevents an update that is not finite.

    Where the optimizer's kernels decide (fused, on a GPU), the host reads the norm one step later.
    """

    def __init__(self, optimizer: Optimizer, max_norm: float | None) -> None:
        self._optimizer, self._max_norm = optimizer, max_norm
        self._unread: HostValue | None = None
        self.last: HostValue | None = None
        """Of the last update, where one was measured."""

    @contextmanager
    def clipped(self, strategy: Strategy, step: int, *, clip: bool, is_scaled: bool) -> Iterator[HostValue | None]:
        """For the update of `step`; yields the norm. It counts as `last` once the block is done.

        Under a loss scale the scaler has checked every gradient already: they are read again only to clip them.
        """
        norm: HostValue | None = None
        if not clip or (is_scaled and self._max_norm is None):
            yield None
        else:
            total = strategy.clip_grad_norm(self._max_norm)
            norm = HostValue(total)
            if not is_scaled and decides_on_device(self._optimizer, total):
                with only_if_finite(self._optimizer, total):
                    yield norm
            else:
                require_finite("the norm of the gradient", norm.wait(), strategy, step)
                yield norm
        self._unread = self.last = norm

    def take_failed(self) -> float | None:
        """The norm of the last update if it was not finite, so that the update did not happen; asked once."""
        norm, self._unread = self._unread, None
        return None if norm is None or math.isfinite(norm.wait()) else norm.wait()

    def forget(self) -> None:
        """Give up what is not yet known of the last update."""
        self._unread = None


def require_finite(what: str, value: float, strategy: Strategy, step: int, update: Update | None = None) -> None:
    """Raise NonFiniteLoss unless `value`, which is equal on all ranks, is a finite number; `update` has this rank's."""
    if math.isfinite(value):
        return
    mine = value if update is None else float(update.loss)
    rank = process_group.rank()
    everyone = {rank: mine} if strategy.steps_alone else dict(enumerate(all_gather_object(mine)))
    bad = [one for one, other in everyone.items() if not math.isfinite(other)]
    raise NonFiniteLoss(
        f"{what} of step {step} is {value}: no parameter was changed",
        step=step,
        ranks=bad,
        rank=rank,
    )
