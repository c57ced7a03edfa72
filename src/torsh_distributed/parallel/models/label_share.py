"""What part of a batch's loss a piece of it stands for, when pieces have different numbers of labels.

A loss averages over the labels that count; the mean of the pieces' means is the mean of the batch only if every piece
is weighted by its share of the labels. Labels of -100 do not count, as in torch and transformers, unless the loss says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument

IGNORED = -100


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's own loss compares a token with the label of the next: transformers' causal models do.

    It is also the loss of models for which transformers knows none, such as GPT2LMHeadModel.
    """
    return hasattr(model, "loss_type") and model.loss_type in (None, "ForCausalLM")


def shifted(labels: Tensor) -> Tensor:
    """The label of the next position at each position; the last one has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class LabelRule:
    """Which labels a loss counts, how much each is worth, and whether it averages or adds them."""

    ignore_index: int = IGNORED
    class_weights: Tensor | None = None
    """A label is worth the weight of its class, as in torch's cross_entropy; None: all are worth 1."""
    is_sum: bool = False
    """The loss adds what others average: parts of a batch are added too."""
    is_uniform: bool = False
    """Labels do not matter: parts of equal size weigh the same."""

    def count(self, labels: Tensor, *, is_shifted: bool = False) -> Tensor:
        """What the labels are worth together: a scalar in fp64.

        `is_shifted`: the loss compares a token with the label of the next one, so the first label of a row is not used.
        """
        used = labels[..., 1:] if is_shifted and labels.dim() > 1 else labels
        counted = used != self.ignore_index
        if self.class_weights is None:
            return counted.sum().double()
        weights = self.class_weights.to(labels.device)
        return (weights[torch.where(counted, used, 0)] * counted).sum().double()

    def weights_of(self, pieces: Sequence[Any], *, is_shifted: bool = False) -> Tensor | None:
        """What the loss of each piece is multiplied by to add up to that of all; None where labels do not say.

        All pieces weigh the same then.
        """
        if self.is_sum:
            return torch.ones(len(pieces))
        if self.is_uniform or not all(_has_labels(piece) for piece in pieces):
            return None
        counts = torch.stack([self.count(piece, is_shifted=is_shifted) for piece in pieces])
        return (counts / counts.sum()).float()

    def share_of(self, part: Any, whole: Any, num_parts: int) -> Tensor | None:
        """What the loss of one of `num_parts` parts is multiplied by, so the mean over them is that of the whole."""
        if self.is_sum:
            return torch.tensor(float(num_parts))
        if self.is_uniform or not _has_labels(part):
            return None
        return (self.count(part) * num_parts / self.count(whole)).float()

    def with_a_label(self, labels: Tensor, *, is_shifted: bool = False) -> Tensor:
        """The same labels; a piece in which none counts gets one, because the mean over none is not a number.

        Its weight is 0, so the label has no effect.
        """
        out = labels.clone()
        place = (0,) * (labels.dim() - 1) + (-1,)
        any_class = int(self.ignore_index == 0) if self.class_weights is None else int(self.class_weights.argmax())
        is_counted = self.count(labels, is_shifted=is_shifted) > 0
        out[place] = torch.where(is_counted, labels[place], torch.full_like(labels[place], any_class))
        return out


@dataclass(frozen=True)
class PartCounts:
    """What parts of a batch's rows count, where labels in the targets do not say it: a mask, weights, a selection."""

    count: Callable[[Any], Tensor | float] | None = None
    """Of a part of the batch; None: only its loss knows."""
    guarded: Callable[[Any], Any] = lambda part: part
    """The part, changed so that its loss is a number although nothing in it counts."""
    take: Callable[[], Tensor] | None = None
    """What the loss computed last was a mean of."""

    def share_of(self, part: Any, parts: Sequence[Any]) -> Tensor:
        """What the loss of `part` is multiplied by, so the mean over all `parts` is that of the whole."""
        assert self.count is not None, "the batch tells"
        own = torch.as_tensor(self.count(part), dtype=torch.float64)
        total = torch.stack([torch.as_tensor(self.count(one), dtype=torch.float64) for one in parts]).sum()
        return (own * len(parts) / torch.where(total == 0, 1.0, total)).float()


def _has_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dim() > 0


_NO_LOSS = 'put labels into the batch ({"input_ids": …, "labels": …}), or pass loss_fn to parallelize()'


def require_labels(inputs: Mapping[str, Any], kind: str) -> Tensor:
    """The labels from which a model of class `kind` computes its loss; InvalidArgument if there are none."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        raise InvalidArgument(f"{kind} computes its loss from labels, and the batch has none", hint=_NO_LOSS)
    return labels


def own_loss(output: Any, kind: str) -> Tensor:
    """The loss that a model of class `kind` computed itself: its output, or `loss` of it, or its first value."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.dim():
        raise InvalidArgument(f"{kind} returned no loss for this batch", hint=_NO_LOSS)
    return loss
