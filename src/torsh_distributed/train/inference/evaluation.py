"""The mean loss and the metrics of a loader, each sample evaluated by one rank, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.train.batches import Batch, RankBatch, to_device
from torsh_distributed.train.inference.metrics import MetricSet
from torsh_distributed.train.losses.engine_loss import EngineLoss
from torsh_distributed.train.losses.loss_kind import LossKind, SumOfSamples, WholeBatch, as_tensor
from torsh_distributed.train.precision import Precision


def _weight(kind: LossKind, piece: RankBatch, batch: Batch) -> Tensor | float:
    """What a loss weighs beside those of other batches and of other ranks' parts of this one."""
    if isinstance(kind, WholeBatch):  # of all ranks: each has its part of the mean
        return float(piece.total)
    return kind.count(batch)


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    pieces: Iterable[RankBatch],
    *,
    loss: EngineLoss,
    kind: Callable[[Batch], LossKind],
    precision: Precision,
    device: torch.device,
    metrics: Mapping[str, Any] | None,
) -> float | dict[str, Any]:
    """The mean loss over `pieces`, this rank's batches; with `metrics` a dict of it and them. Every rank calls this.

    `kind` tells what the loss is a mean of: that is what the losses of batches weigh. Sums are averaged over batches.
    """
    seen = None if metrics is None else MetricSet(metrics, strategy.samples_group, device)
    was_training = strategy.model.training
    modes = [(module, module.training) for module in strategy.model.modules()]
    strategy.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        for piece in pieces:
            batch = to_device(piece.batch, device)
            what = kind(batch)
            loss.is_borrowed = piece.num_samples == 0
            if loss.is_borrowed and not (strategy.forward_is_collective or loss.is_collective):
                continue  # other ranks evaluate these samples
            if seen is not None:
                seen.num_samples = piece.num_samples
            with precision.computing():
                value = loss.compute(
                    strategy, strategy.unwrapped, batch, watching=None if seen is None else seen.watching
                )
            computed = loss.take_count()
            if piece.num_samples or isinstance(what, WholeBatch):
                count = as_tensor(_weight(what, piece, batch) if computed is None else computed.count, device)
                # The mean over no label is not a number.
                sums[0] += torch.where(count > 0, value.double() * count, 0.0)
                # Sums are added, and a batch counts once, however many ranks have a part of it.
                sums[1] += piece.num_samples / piece.total if isinstance(what, SumOfSamples) else count
    finally:
        loss.is_borrowed = False
        strategy.model.train(was_training)
        for module, mode in modes:
            module.training = mode
    loss_sum, count_sum = (strategy.mean_over_ranks(value).wait() for value in sums)
    if count_sum == 0:
        raise InvalidArgument("there is nothing to evaluate: the loader gave no batch", hint="check the loader")
    mean = loss_sum / count_sum
    return mean if seen is None else {"loss": mean, **seen.results()}
