"""What a loss is a mean of, or that it is a sum.

Losses of microbatches and ranks are combined by it: each weighs as much as what it counts. A loss that counts labels
would otherwise give a label in a padded batch more weight than one in a full batch.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.data.synced_batch_norm import batch_norms
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts
from torsh_distributed.plan import Plan
from torsh_distributed.train.batches import Batch, count_samples

_log = logging.getLogger(__name__)


def check_coupled_samples(model: nn.Module, plan: Plan, *, data_degree: int) -> None:
    """Refuse losses over all tokens of a batch that is divided; warn of BatchNorm. Every rank calls this."""
    microbatches = plan.pipeline.num_microbatches if plan.mesh.pp > 1 else 1
    passes = plan.training.gradient_accumulation * microbatches
    if data_degree == 1 and passes == 1:
        return
    config: Any = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0):
        raise ConfigurationError(
            f"{type(model).__name__} has output_router_logits = True: its load-balancing loss is over all tokens of a"
            f" batch, and {data_degree} ranks and {passes} passes have only their own",
            hint="set model.config.output_router_logits = False; or build the model with td.MoELayer, whose"
            " load-balancing loss is over the batch of all ranks",
            keys=("mesh.dp", "mesh.shard", "training.gradient_accumulation"),
        )
    _refuse_embeddings(model, data_degree=data_degree, passes=passes)
    names = batch_norms(model)
    if not names or process_group.rank() != 0:
        return
    if passes > 1:
        _log.warning(
            "%d BatchNorm layers (%s, …) normalise each of the %d passes of a step by itself: losses differ from"
            " those of one pass; training.gradient_accumulation = 1 avoids it",
            len(names),
            names[0],
            passes,
        )
    if data_degree > 1 and not plan.training.sync_batch_norm:
        _log.warning(
            "%d BatchNorm layers (%s, …) normalise by the samples of each rank alone: losses differ from those of one"
            " process; training.sync_batch_norm = true makes them equal",
            len(names),
            names[0],
        )


def _refuse_embeddings(model: nn.Module, *, data_degree: int, passes: int) -> None:
    """Embeddings that look at all ids of a batch: ranks change or weigh the rows of their own ids only."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.weight.requires_grad:
            continue
        if module.max_norm is not None and data_degree > 1:
            raise ConfigurationError(
                f"the embedding {name} has max_norm: forward shortens the rows it reads, and each of {data_degree}"
                " ranks reads others, so that their weights would drift apart",
                hint="leave max_norm out and shorten all rows after the step, or train with mesh.dp = 1",
                keys=("mesh.dp", "mesh.shard"),
            )
        if module.scale_grad_by_freq:
            raise ConfigurationError(
                f"the embedding {name} has scale_grad_by_freq: it divides gradients by how often an id is in the batch,"
                f" and {data_degree} ranks and {passes} passes see only their own part of it",
                hint="leave scale_grad_by_freq out, or train with one rank and one pass",
                keys=("mesh.dp", "mesh.shard", "training.gradient_accumulation"),
            )


Path = tuple[str | int, ...]
"""Keys and positions that lead to a tensor in a nested batch."""


class LossKind(ABC):
    """How much a (micro)batch's loss stands for."""

    @abstractmethod
    def count(self, batch: Batch) -> Tensor | float:
        """What the loss of `batch` is a mean of: a number of samples, labels or values."""

    def guarded(self, batch: Batch) -> Batch:
        """The batch, changed so that its loss is a number although nothing in it counts."""
        return batch

    @property
    def labels(self) -> LabelRule:
        """How strategies combine losses that they compute part by part."""
        return LabelRule(is_uniform=True)

    @property
    def parts(self) -> PartCounts | None:
        """The same where rows stay whole; None: parts of as many rows weigh alike, or `labels` says it."""
        return None

    @abstractmethod
    @override
    def __str__(self) -> str:
        """For messages: completes "the loss is …"."""


class MeanOfSamples(LossKind):
    """A mean in which every sample weighs the same."""

    @override
    def count(self, batch: Batch) -> float:
        return float(count_samples(batch))

    @override
    def __str__(self) -> str:
        return "a mean over samples"


class SumOfSamples(LossKind):
    """A sum: ranks and microbatches add theirs."""

    @override
    def count(self, batch: Batch) -> float:
        return 1.0

    @property
    @override
    def labels(self) -> LabelRule:
        return LabelRule(is_sum=True)

    @override
    def __str__(self) -> str:
        return "a sum"


class WholeBatch(LossKind):
    """A mean over the batch of all ranks, computed by each of them, or by all together."""

    @override
    def count(self, batch: Batch) -> float:
        return float(count_samples(batch))

    @override
    def __str__(self) -> str:
        return "of the batch of all ranks"


@dataclass(frozen=True)
class MeanOfLabels(LossKind):
    """A mean over the labels that count, found at `path` in the batch."""

    path: Path
    rule: LabelRule = field(default_factory=LabelRule)
    is_shifted: bool = False

    @override
    def count(self, batch: Batch) -> Tensor:
        return self.rule.count(tensor_at(batch, self.path), is_shifted=self.is_shifted)

    @override
    def guarded(self, batch: Batch) -> Batch:
        labels = tensor_at(batch, self.path)
        return replaced(batch, self.path, self.rule.with_a_label(labels, is_shifted=self.is_shifted))

    @property
    @override
    def labels(self) -> LabelRule:
        return self.rule

    @property
    @override
    def parts(self) -> PartCounts:
        return PartCounts(self.count, self.guarded)

    @override
    def __str__(self) -> str:
        return f"a mean over the labels other than {self.rule.ignore_index}"


@dataclass(frozen=True)
class MeanOfValues(LossKind):
    """A mean over all values of the tensor at `path`."""

    path: Path

    @override
    def count(self, batch: Batch) -> float:
        return float(tensor_at(batch, self.path).numel())

    @override
    def __str__(self) -> str:
        return "a mean over values"


@dataclass(frozen=True)
class MeanOfWeights(LossKind):
    """A mean weighted by the tensor at `path`: a mask, the weights of samples, or lengths."""

    path: Path
    by: Literal["weights", "not negative", "known"] = "weights"
    """`weights`: an entry weighs what it is; `not negative`: 1 unless below 0, as labels are; `known`: 1 unless NaN."""

    @override
    def count(self, batch: Batch) -> Tensor:
        found = tensor_at(batch, self.path)
        if self.by == "known":
            found = ~found.isnan()
        return (found >= 0 if self.by == "not negative" else found).double().sum()

    @override
    def guarded(self, batch: Batch) -> Batch:
        weights = tensor_at(batch, self.path).clone()
        place = (0,) * weights.dim()
        counted = torch.full_like(weights[place], 1 if self.by == "weights" else 0)
        weights[place] = torch.where(self.count(batch) == 0, counted, weights[place])
        return replaced(batch, self.path, weights)

    @property
    @override
    def parts(self) -> PartCounts:
        return PartCounts(self.count, self.guarded)

    @override
    def __str__(self) -> str:
        return "a mean weighted by a tensor of the batch"


@dataclass(frozen=True)
class MeanOfComputed(LossKind):
    """A mean over something that only the loss knows: it returns `(sum, count)`, or calls a torch loss that tells."""

    has_several: bool = False
    """The loss has several means: what one of them counts must be in proportion to what the others count."""

    @override
    def count(self, batch: Batch) -> Tensor:
        raise AssertionError("the count comes with the loss")

    @override
    def __str__(self) -> str:
        return "a mean over what it selects"


def tensors_in(batch: Batch, path: Path = ()) -> list[tuple[Path, Tensor]]:
    """The tensors of a nested batch with their paths, targets last."""
    if isinstance(batch, Tensor):
        return [(path, batch)]
    if isinstance(batch, Mapping):
        return [found for key, value in batch.items() for found in tensors_in(value, (*path, key))]
    if isinstance(batch, tuple | list):
        return [found for place, value in enumerate(batch) for found in tensors_in(value, (*path, place))]
    return []


def tensor_at(batch: Batch, path: Path) -> Tensor:
    """The tensor at `path`."""
    value: Any = batch
    for key in path:
        value = value[key]
    assert isinstance(value, Tensor)
    return value


def replaced(batch: Any, path: Path, tensor: Tensor) -> Any:
    """The batch with another tensor at `path`; nothing in place."""
    if not path:
        return tensor
    first, rest = path[0], path[1:]
    if isinstance(batch, Mapping):
        return {**batch, first: replaced(batch[first], rest, tensor)}
    assert isinstance(first, int)
    values = [*batch[:first], replaced(batch[first], rest, tensor), *batch[first + 1 :]]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def as_tensor(count: Tensor | float, device: torch.device) -> Tensor:
    """A count as a scalar in fp64 on `device`."""
    return torch.as_tensor(count, dtype=torch.float64, device=device)
