"""The mean loss and the metrics of a loader, each sample evaluated by one rank, under any strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.strategy import ComputeLoss, Strategy
from torsh_distributed.train.batches import RankBatch, to_device
from torsh_distributed.train.loss import LossFn, loss_of
from torsh_distributed.train.precision import Precision
from torsh_distributed.train.use.metrics import MetricSet


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    pieces: Iterable[RankBatch],
    *,
    loss_fn: LossFn | None,
    precision: Precision,
    device: torch.device,
    metrics: Mapping[str, Any] | None,
) -> float | dict[str, Any]:
    """The mean loss over `pieces`, this rank's batches; with `metrics` a dict of it and them. Every rank calls this."""
    seen = None if metrics is None else MetricSet(metrics, strategy.samples_group, device)
    was_training = strategy.model.training
    strategy.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        for piece in pieces:
            if piece.num_samples == 0 and not strategy.forward_is_collective:
                continue  # other ranks evaluate these samples
            chosen: LossFn | None = loss_fn
            compute: ComputeLoss = loss_of
            if seen is not None:
                seen.num_samples = piece.num_samples
                chosen, compute = seen.watching(loss_fn)
            with precision.computing():
                loss = strategy.loss(strategy.unwrapped, to_device(piece.batch, device), chosen, compute)
            if piece.num_samples:
                sums[0] += loss.double() * piece.num_samples
                sums[1] += piece.num_samples
    finally:
        strategy.model.train(was_training)
    loss_sum, count_sum = (strategy.mean_loss(value).wait() for value in sums)
    if count_sum == 0:
        raise InvalidArgument("there is nothing to evaluate: the loader gave no batch", hint="check the loader")
    mean = loss_sum / count_sum
    return mean if seen is None else {"loss": mean, **seen.results()}
