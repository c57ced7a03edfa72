"""What a look at one loss tells about what it is a mean of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.models.label_share import IGNORED, LabelRule, shifted, shifts_labels
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.train.batches import Batch, count_samples, pick_rows
from torsh_distributed.train.losses.loss_kind import (
    LossKind,
    MeanOfComputed,
    MeanOfLabels,
    MeanOfSamples,
    MeanOfValues,
    Path,
    SumOfSamples,
    tensor_at,
    tensors_in,
)
from torsh_distributed.train.losses.loss_terms import LossTerm


@dataclass(frozen=True)
class LossFinding:
    """What one rank saw."""

    kind: LossKind
    names: tuple[str, ...] = ()
    has_seen: bool = True

    @classmethod
    def of(
        cls, strategy: Strategy, batch: Batch, value: Tensor, terms: Sequence[LossTerm], *, returns_count: bool
    ) -> LossFinding:
        """What the loss `value` of `batch` is, whose computation called `terms`."""
        names = tuple(term.name for term in terms)
        if returns_count:
            return cls(MeanOfComputed(), names)
        means = _distinct([term for term in terms if term.reduction == "mean"])
        if not means:
            is_sum = len(terms) == 1 and terms[0].reduction == "sum" and _equal(_plain(terms[0].result), value.float())
            return cls(SumOfSamples() if is_sum else MeanOfSamples(), names, has_seen=bool(terms))
        if len(means) > 1:
            return cls(MeanOfComputed(has_several=True), names)
        return cls(_kind_of(means[0], strategy, batch), names)

    def packed(self) -> dict[str, Any]:
        """As plain values, for the other ranks."""
        kind = self.kind
        out: dict[str, Any] = {"kind": type(kind).__name__, "names": list(self.names), "has_seen": self.has_seen}
        if isinstance(kind, MeanOfLabels | MeanOfValues):
            out["path"] = list(kind.path)
        if isinstance(kind, MeanOfLabels):
            weights = kind.rule.class_weights
            out |= {"ignore_index": kind.rule.ignore_index, "is_shifted": kind.is_shifted}
            out["class_weights"] = None if weights is None else weights.cpu()
        if isinstance(kind, MeanOfComputed):
            out["has_several"] = kind.has_several
        return out

    @classmethod
    def unpacked(cls, values: dict[str, Any]) -> LossFinding:
        """What another rank packed."""
        name = values["kind"]
        path = tuple(values.get("path", ()))
        made: LossKind
        if name == MeanOfLabels.__name__:
            made = MeanOfLabels(path, LabelRule(values["ignore_index"], values["class_weights"]), values["is_shifted"])
        elif name == MeanOfValues.__name__:
            made = MeanOfValues(path)
        elif name == MeanOfComputed.__name__:
            made = MeanOfComputed(values["has_several"])
        else:
            made = SumOfSamples() if name == SumOfSamples.__name__ else MeanOfSamples()
        return cls(made, tuple(values["names"]), values["has_seen"])


def _kind_of(term: LossTerm, strategy: Strategy, batch: Batch) -> LossKind:
    """The tensor of the batch that a mean is over, so later batches say it themselves; else the loss has to."""
    if term.labels is None or term.rule is None:
        for path, tensor in reversed(tensors_in(batch)):
            if tensor.numel() == int(term.count) and tensor.dim():
                return MeanOfValues(path)
        return MeanOfComputed()
    if strategy.num_sample_ranks != strategy.data_degree:  # they are those of parts of sequences
        place = labels_path(batch)
        is_shifted = place == ("labels",) and shifts_labels(strategy.whole_model)
        return MeanOfComputed() if place is None else MeanOfLabels(place, term.rule, is_shifted)
    seen = term.labels.flatten()
    for path, tensor in reversed(tensors_in(batch)):
        if tensor.is_floating_point() or not tensor.dim():
            continue
        if _equal(tensor.flatten(), seen):
            return MeanOfLabels(path, term.rule)
        if tensor.dim() > 1 and (_equal(tensor[..., 1:].flatten(), seen) or _equal(shifted(tensor).flatten(), seen)):
            return MeanOfLabels(path, term.rule, is_shifted=True)
    return MeanOfComputed()


def counted_labels(strategy: Strategy, batch: Batch) -> MeanOfLabels:
    """A mean over the labels other than -100, as the plan declares it."""
    path = labels_path(batch)
    if path is None:
        raise ConfigurationError(
            'training.loss_is = "mean_of_counted" needs labels: the batch has none',
            hint="put them into the batch under that name, give batches of (inputs, targets), or let loss_fn return"
            " (sum, count)",
            key="training.loss_is",
        )
    return MeanOfLabels(path, is_shifted=path == ("labels",) and shifts_labels(strategy.whole_model))


def labels_path(batch: Batch) -> Path | None:
    """Where labels are by convention: under that name, or in the targets of (inputs, targets)."""
    found = dict(tensors_in(batch))
    for path in (("labels",), (1,)):
        if path in found:
            return path
    return None


def telling_rows(batch: Batch, num_rows: int) -> Batch:
    """At most `num_rows` samples, at least two, of which some have many labels that count and others few.

    A batch of one sample has it twice: what compares samples shows then, too.
    """
    rows = count_samples(batch)
    chosen = list(range(rows)) * (2 if rows == 1 else 1)
    path = labels_path(batch)
    labels = None if path is None else tensor_at(batch, path)
    if labels is not None and not labels.is_floating_point() and labels.dim() and len(labels) == rows > num_rows:
        counts = (labels.reshape(rows, -1) != IGNORED).sum(dim=1)
        by_count = [int(row) for row in counts.argsort(descending=True)]
        half = num_rows // 2
        chosen = [*by_count[: num_rows - half], *by_count[rows - half :]]
    return pick_rows(batch, chosen[:num_rows])


def _distinct(terms: Sequence[LossTerm]) -> list[LossTerm]:
    """Without those that repeat another: a pipeline may compute the loss twice when it first runs."""
    kept: list[LossTerm] = []
    for term in terms:
        if not any(_equal(_plain(one.result), _plain(term.result)) and one.count == term.count for one in kept):
            kept.append(term)
    return kept


def _plain(value: Tensor) -> Tensor:
    whole = whole_of(value)
    return whole.detach().float()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
