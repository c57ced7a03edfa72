"""Finds the head of a model, and lets its loss be computed without whole logits (`training.fused_loss`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.wrapping import repeated_layers
from torsh_distributed.train.speed.deferred_logits import DeferredLogits


def find_head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The linear layer that turns hidden states into logits of the vocabulary, with its name; None if there is none.

    What the model itself says counts first (`get_output_embeddings()`, as in transformers); else the one linear layer,
    outside the layers that repeat, that maps from the width of an embedding to its number of entries.
    """
    names = {id(module): name for name, module in model.named_modules()}
    declared = getattr(model, "get_output_embeddings", None)
    head = declared() if callable(declared) else None
    if isinstance(head, nn.Linear) and id(head) in names:
        return names[id(head)], head
    inside = {id(part) for layer in repeated_layers(model).values() for part in layer.modules()}
    shapes = {tuple(one.weight.shape) for one in model.modules() if isinstance(one, nn.Embedding)}
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and tuple(module.weight.shape) in shapes and id(module) not in inside
    ]
    return found[0] if len(found) == 1 else None


def defer_logits(model: nn.Module) -> str:
    """Let the model's head return DeferredLogits, in place; returns its name. Refuses a model without one head."""
    found = find_head(model)
    if found is None:
        raise ConfigurationError(
            f"training.fused_loss: {type(model).__name__} has no linear head that can be told from its other layers",
            hint="call torsh_distributed.linear_cross_entropy(hidden, head.weight, targets) in the model's forward"
            " instead, or give the model a get_output_embeddings() that returns its head",
            key="training.fused_loss",
        )
    name, head = found
    head.forward = _DeferredHead(head)  # type: ignore[method-assign, assignment]  # names and hooks stay
    return name


class _DeferredHead:
    """The head's forward: keeps its input, and the weight as it is at this moment, gathered if it is sharded."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._head.weight.dtype
        return DeferredLogits(hidden, self._head.weight, self._head.bias, compute_dtype=dtype, dtype=dtype)
