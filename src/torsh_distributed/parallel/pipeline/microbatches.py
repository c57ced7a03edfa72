"""The batch of a step in parts: each with its inputs, its targets and its weight in the loss.

Every rank of a pipeline has the whole batch, so masks, position ids and labels are not sent: each stage takes those of
the microbatch that it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts


class Microbatched(tuple[Any, ...]):
    """A value for each microbatch, as inputs or targets of a step: they are not cut, and may hold anything."""


class Microbatches:
    """The current batch in parts, and which part runs now."""

    def __init__(self) -> None:
        self.current = 0
        self._inputs: list[Mapping[str, Any]] = [{}]
        self._targets: list[Any] = [None]
        self._weights: Tensor | None = None
        self.labels = LabelRule()
        """Which labels the loss counts."""
        self.counts: PartCounts | None = None
        """What else it counts, in place of them."""
        self._num_real = 1

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Inputs of the current microbatch by name."""
        return self._inputs[self.current]

    @property
    def targets(self) -> Any:
        """Targets of the current microbatch."""
        return self._targets[self.current]

    @property
    def weight(self) -> Tensor | float:
        """The current microbatch's share of the loss."""
        if not self.is_real:
            return 0.0
        return 1 / self._num_real if self._weights is None else self._weights[self.current]

    @property
    def is_real(self) -> bool:
        """Whether the current microbatch has rows of its own."""
        return self.current < self._num_real

    def first_row(self, num_rows: int) -> int:
        """The first row of the current microbatch, of `num_rows` rows, in the batch."""
        return self.current * num_rows

    def load(
        self,
        inputs: Mapping[str, Any],
        targets: Any,
        count: int,
        *,
        num_real: int | None = None,
        shifts: bool = False,
        batch: Any = None,
    ) -> None:
        """Cut a batch into `count` parts. `shifts`: the loss compares a token with the label of the next one; `batch`:
        inputs and targets as they were given.

        The loss is in the targets, or in `labels` of the inputs if there are none. Parts after the first `num_real`
        weigh nothing.
        """
        num_rows = rows_in({"inputs": inputs, "targets": targets})
        if num_rows % count:
            raise TensorShapeMismatch(
                f"pipeline.num_microbatches {count} does not divide the batch of {num_rows}",
                hint=f"make each rank's batch a multiple of {count} (drop_last=True in the loader), or change"
                " pipeline.num_microbatches",
            )
        self.current = 0
        self._num_real = real = count if num_real is None else num_real
        self._inputs = [_part(inputs, part, num_rows, count) for part in range(count)]
        self._targets = [_part(targets, part, num_rows, count) for part in range(count)]
        self._weights = None
        if self.counts is not None:
            self._weigh(self.counts, inputs, has_targets=targets is not None, batch=batch)
            return
        # Shifted before, because sequences are split, or by the model.
        name = "shift_labels" if "shift_labels" in inputs else "labels"
        if targets is None and name in inputs:
            shifts = shifts and name == "labels"
            rule = self.labels
            self._weights = rule.weights_of([part[name] for part in self._inputs[:real]], is_shifted=shifts)
            if self._weights is not None and not rule.is_sum:
                self._inputs = [
                    {**part, name: rule.with_a_label(part[name], is_shifted=shifts)} for part in self._inputs
                ]
        else:
            self._weights = self.labels.weights_of(self._targets[:real])
            if self._weights is not None and not self.labels.is_sum:
                self._targets = [self.labels.with_a_label(part) for part in self._targets]

    def _weigh(self, counts: PartCounts, inputs: Mapping[str, Any], *, has_targets: bool, batch: Any) -> None:
        """Weigh the parts by what they count; those in which nothing counts are guarded."""
        if counts.count is None:
            return  # their losses tell
        num_rows, num_parts = rows_in(batch), len(self._inputs)
        parts = [_part(batch, part, num_rows, num_parts) for part in range(num_parts)]
        found = [torch.as_tensor(counts.count(part), dtype=torch.float64) for part in parts[: self._num_real]]
        total = torch.stack(found).sum()
        self._weights = (torch.stack(found) / torch.where(total == 0, 1.0, total)).float()
        if has_targets:
            self._targets = [counts.guarded((None, part))[1] for part in self._targets]
        elif isinstance(batch, Mapping):
            # Those of a traced model are named by their places.
            names = {place: name for place, one in inputs.items() for name, given in batch.items() if given is one}
            safe = [
                counts.guarded({names.get(place, place): one for place, one in part.items()}) for part in self._inputs
            ]
            self._inputs = [{place: part[names.get(place, place)] for place in inputs} for part in safe]


def shapes_of(value: Any) -> Any:
    """The shapes and dtypes of the tensors in nested values, to compare batches by."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, shapes_of(one)) for key, one in value.items())
    if isinstance(value, tuple | list):
        return tuple(shapes_of(one) for one in value)
    return None


def padded(value: Any, num_rows: int, count: int) -> Any:
    """`count` rows where there are `num_rows`: the first one again and again."""
    if isinstance(value, Microbatched):
        return Microbatched((*value, *value[:1] * (count - num_rows)))
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != num_rows:
            return value
        return torch.cat([value, value[:1].expand(count - num_rows, *value.shape[1:])])
    if isinstance(value, Mapping):
        return {key: padded(one, num_rows, count) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(padded(one, num_rows, count) for one in value)
    return value


def rows_in(value: Any) -> int:
    """The number of samples: the largest dim 0 of the tensors; or that of microbatches, if they are cut already."""
    if isinstance(value, Microbatched):
        return len(value)
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else 0
    if isinstance(value, Mapping):
        return max((rows_in(one) for one in value.values()), default=0)
    if isinstance(value, tuple | list):
        return max((rows_in(one) for one in value), default=0)
    return 0


def _part(value: Any, part: int, num_rows: int, count: int) -> Any:
    """Rows of one microbatch; tensors without a row for each sample, such as (1, length) position ids, go to all."""
    if isinstance(value, Microbatched):
        return value[part]
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != num_rows:
            return value
        size = num_rows // count
        return value[part * size : (part + 1) * size].contiguous()
    if isinstance(value, Mapping):
        return {key: _part(one, part, num_rows, count) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_part(one, part, num_rows, count) for one in value)
    return value


def numbers(count: int, device: torch.device) -> Tensor:
    """What torch splits in place of the targets: the loss takes those of the current microbatch."""
    return torch.arange(count, device=device)
