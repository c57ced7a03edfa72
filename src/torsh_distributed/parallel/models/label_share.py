"""What part of a batch's loss a piece of it stands for, when pieces have different numbers of labels.

A loss averages over the labels that count; the mean of the pieces' means is the mean of the batch only if every piece
is weighted by its share of the labels. Labels of -100 do not count, as in torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def label_weights(pieces: Sequence[Any], *, is_shifted: bool = False) -> Tensor | None:
    """Each piece's share of the labels that count; None where labels do not say: all pieces weigh the same.

    `is_shifted`: the loss compares a token with the label of the next one, so the first label of a row is not used.
    """
    if not all(isinstance(piece, Tensor) and not piece.is_floating_point() and piece.dim() for piece in pieces):
        return None
    used = [piece[..., 1:] if is_shifted and piece.dim() > 1 else piece for piece in pieces]
    counts = torch.stack([(piece != IGNORED).sum() for piece in used]).float()
    return counts / counts.sum()


def share_of(part: Any, whole: Any, num_parts: int) -> Tensor | None:
    """What the loss of one of `num_parts` parts is multiplied by, so the mean over the parts is that of the whole."""
    if not isinstance(part, Tensor) or part.is_floating_point() or not part.dim():
        return None
    counted, total = ((one != IGNORED).sum() for one in (part, whole))
    return counted * num_parts / total


def with_a_label(labels: Tensor, *, is_shifted: bool = False) -> Tensor:
    """The same labels; a piece in which none counts gets one, because the mean over none is not a number.

    Its weight is 0, so the label has no effect.
    """
    used = labels[..., 1:] if is_shifted and labels.dim() > 1 else labels
    out = labels.clone()
    place = (0,) * (labels.dim() - 1) + (-1,)
    out[place] = torch.where((used != IGNORED).any(), labels[place], torch.zeros_like(labels[place]))
    return out


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
