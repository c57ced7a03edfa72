"""A few rows of a batch that show as much as all of them: with padding, and short where sequences are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torsh_distributed.parallel.models.anatomy import is_from_transformers
from torsh_distributed.parallel.models.label_share import IGNORED
from torsh_distributed.parallel.torch_internals import tree_map
from torsh_distributed.train.batches import Batch, count_samples, pick_rows
from torsh_distributed.train.loss import LossFn

_POSITIONS_PER_RANK = 32


def small_batch(batch: Batch, *, num_rows: int, cp: int) -> Batch:
    """The row of `batch` with the fewest labels of -100, others, and as the last one that with the most; copied.

    `cp`: sequences (dim 1) that are split over so many ranks are cut to a few positions for each.
    """
    total = count_samples(batch)
    ignored = torch.zeros(total)
    _each(batch, lambda tensor: _add_ignored(ignored, tensor))
    by_padding = [int(row) for row in ignored.argsort(stable=True)]
    rows = by_padding if num_rows >= total else [*by_padding[: num_rows - 1], by_padding[-1]]
    chosen = pick_rows(batch, rows) if bool(ignored.any()) or num_rows < total else batch
    lengths = {tensor.shape[1] for tensor in _tensors(chosen) if tensor.dim() > 1}
    limit = _POSITIONS_PER_RANK * cp
    if cp > 1 and len(lengths) == 1 and max(lengths) > limit:
        chosen = tree_map(lambda value: value[:, :limit] if _is_sequence(value) else value, chosen)
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, chosen)


def num_ignored(rows: Batch) -> int:
    """Labels of -100 in the first one of `rows`."""
    found = torch.zeros(count_samples(rows))
    _each(rows, lambda tensor: _add_ignored(found, tensor))
    return int(found[0])


def with_padding(batch: Batch, model: nn.Module, loss_fn: LossFn | None) -> Batch | None:
    """The batch with the end of its last row padded: labels of -100, and 0 in its attention mask.

    None where the loss is not known to leave such labels out: others would read beyond a table, which ends a GPU's job.
    """
    if loss_fn is None:
        if not (isinstance(batch, dict) and is_from_transformers(model) and _is_labels(batch.get("labels"))):
            return None
        padded = {**batch, "labels": _without_end(batch["labels"], IGNORED)}
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == batch["labels"].shape and bool(mask.all()):
            padded["attention_mask"] = _without_end(mask, 0)
        return padded
    is_cross_entropy = loss_fn is functional.cross_entropy or isinstance(loss_fn, nn.CrossEntropyLoss)
    if not is_cross_entropy or getattr(loss_fn, "ignore_index", IGNORED) != IGNORED:
        return None
    inputs, targets = batch
    return (inputs, _without_end(targets, IGNORED)) if _is_labels(targets) else None


def repeated(batch: Batch, times: int) -> Batch:
    """The rows of `batch` so many times after each other: what ranks that all have them have together."""
    if times == 1:
        return batch
    num_rows = count_samples(batch)
    return tree_map(
        lambda value: torch.cat([value] * times) if isinstance(value, Tensor) and _rows(value) == num_rows else value,
        batch,
    )


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _without_end(tensor: Tensor, value: int) -> Tensor:
    out = tensor.clone()
    out[-1, -max(1, tensor.shape[1] // 3) :] = value
    return out


def _is_labels(value: Any) -> bool:
    is_whole = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    return is_whole and value.shape[0] > 1 and value.shape[1] > 2


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _add_ignored(counts: Tensor, tensor: Tensor) -> None:
    if tensor.dim() and len(tensor) == len(counts) and not tensor.is_floating_point():
        counts += (tensor == IGNORED).flatten(1).sum(dim=1).cpu() if tensor.dim() > 1 else (tensor == IGNORED).cpu()


def _tensors(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []
    _each(batch, found.append)
    return found


def _each(batch: Batch, call: Callable[[Tensor], None]) -> None:
    tree_map(lambda value: call(value) if isinstance(value, Tensor) else None, batch)
