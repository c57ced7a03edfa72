"""Metrics of an evaluation: objects with `update`, `compute` and `reset`, or functions that are averaged over samples.

Every sample is seen by one rank, so what the ranks gathered is joined before the result is computed: metrics of
torchmetrics join their states over the ranks themselves, other objects (torcheval's, for one) exchange their
`state_dict` and are joined by `merge_state`, and the values of a function are weighted by samples.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.strategy import ComputeLoss
from torsh_distributed.train.loss import LossFn, loss_of


class MetricSet:
    """Metrics by name, fed with the outputs of this rank's samples; every rank of the world makes an equal one.

    `group` has the ranks that see different samples. Ranks that see no output, as all but the last of a pipeline, get
    the results of those that do.
    """

    def __init__(self, metrics: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._metrics, self._group = dict(metrics), group
        self._num_ranks = 1 if group is None else group.size()
        self._sums = {name: torch.zeros(2, dtype=torch.float64) for name, one in metrics.items() if _is_function(one)}
        self._has_outputs = False
        self.num_samples = 0
        """Of the batch under way; outputs of a batch of 0 are another rank's and do not count."""
        self._check()
        if dist.is_initialized():
            world = dist.group.WORLD
            assert world is not None
            require_same({"names": list(self._metrics)}, group=world, what="the ranks' metrics", hint="name them alike")
        for one in self._metrics.values():
            if not _is_function(one):
                one.reset()
                if callable(getattr(one, "to", None)):
                    one.to(device)

    def _check(self) -> None:
        for name, one in self._metrics.items():
            if name == "loss":
                raise InvalidArgument("a metric cannot be called loss: that is the name of the mean loss")
            if _is_function(one):
                continue
            lacking = [method for method in ("update", "compute", "reset") if not callable(getattr(one, method, None))]
            if lacking:
                raise InvalidArgument(
                    f"the metric {name} has no {', '.join(lacking)}",
                    hint="give a function of outputs and targets, or an object as torchmetrics has them",
                    got=type(one).__name__,
                )
            if self._num_ranks > 1 and not (_syncs_itself(one) or _can_merge(one)):
                raise InvalidArgument(
                    f"the metric {name} keeps a state that cannot be joined over ranks",
                    hint="derive it from torchmetrics.Metric, give it state_dict, load_state_dict and merge_state,"
                    " or use a function",
                    got=type(one).__name__,
                )

    def watching(self, loss_fn: LossFn | None) -> tuple[LossFn | None, ComputeLoss]:
        """A loss_fn and a way to compute the loss, with one of which the metrics see every output."""
        if loss_fn is None:
            return None, partial(loss_of, seeing=self.update)

        def watched(outputs: Any, targets: Any) -> Any:
            self.update(outputs, targets)
            return loss_fn(outputs, targets)

        return watched, loss_of

    def update(self, outputs: Any, targets: Any) -> None:
        """Count a batch of this rank's samples."""
        self._has_outputs = True
        if self.num_samples == 0:
            return
        seen = outputs.full_tensor() if hasattr(outputs, "full_tensor") else outputs
        for name, one in self._metrics.items():
            if name in self._sums:
                value = one(seen, targets)
                self._sums[name] += torch.tensor([float(value) * self.num_samples, self.num_samples])
            else:
                one.update(seen, targets)

    def results(self) -> dict[str, Any]:
        """The values over all samples, equal on every rank; every rank calls this."""
        # A rank may have had no sample; but if one of the group saw outputs, all of them would have.
        sees = (
            self._has_outputs if self._num_ranks == 1 else any(all_gather_object(self._has_outputs, group=self._group))
        )
        found = {name: self._result(name) for name in self._metrics} if sees else None
        if not dist.is_initialized():
            return found or {}
        everyone = all_gather_object(found)
        return next((one for one in everyone if one is not None), {})

    def _result(self, name: str) -> Any:
        one = self._metrics[name]
        if name in self._sums:
            total = self._sums[name]
            if self._num_ranks > 1:
                total = torch.stack(
                    [
                        torch.tensor(theirs, dtype=torch.float64)
                        for theirs in all_gather_object(total.tolist(), group=self._group)
                    ]
                ).sum(dim=0)
            return float(total[0] / total[1])
        if _syncs_itself(one):
            return _plain(_compute_over(one, self._group))
        if self._num_ranks == 1:
            return _plain(one.compute())
        # States travel, not objects; the object itself keeps this rank's.
        first, *others = [_copy_with(one, state) for state in all_gather_object(one.state_dict(), group=self._group)]
        first.merge_state(others)
        return _plain(first.compute())


def _copy_with(metric: Any, state: Any) -> Any:
    made = copy.deepcopy(metric)
    made.load_state_dict(state)
    return made


def _compute_over(metric: Any, group: dist.ProcessGroup | None) -> Any:
    """The result over the ranks of `group`: torchmetrics joins the states itself, by default over the world.

    Ranks of the world may see the same samples (tp), or none (pp), so it is told where to, even if that is nowhere.
    """
    before = metric.process_group, metric._to_sync
    metric.process_group, metric._to_sync = group, group is not None and group.size() > 1
    # A rank without a sample of its own has the others' once they are joined.
    metric._update_count = max(1, metric._update_count)
    metric._computed = None
    try:
        return metric.compute()
    finally:
        metric.process_group, metric._to_sync = before


def _is_function(metric: Any) -> bool:
    return callable(metric) and not hasattr(metric, "update")


def _can_merge(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("state_dict", "load_state_dict", "merge_state"))


def _syncs_itself(metric: Any) -> bool:
    return all(hasattr(metric, name) for name in ("sync", "process_group", "_to_sync", "_update_count"))


def _plain(value: Any) -> Any:
    """Numbers as numbers, tensors on the host."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value
