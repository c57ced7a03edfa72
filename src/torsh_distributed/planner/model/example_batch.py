"""Inputs of some samples for a model that is traced, and its loss: given, or made from what the model says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.models.anatomy import is_from_transformers
from torsh_distributed.parallel.models.example_inputs import named_inputs, takes, without_cache
from torsh_distributed.parallel.models.structure import POSITIONS
from torsh_distributed.planner.torch_internals import tree_leaves, tree_map

_LENGTH = 512
"""Tokens of a sample for a model that has no limit."""
_IMAGE = 224


@dataclass(frozen=True)
class _TensorShape:
    """A tensor inside an argument, or one that all samples share."""

    shape: tuple[int, ...]
    """Of one sample, or of all."""
    dtype: torch.dtype
    is_shared: bool

    def make(self, num_samples: int) -> Tensor:
        return torch.zeros(self.shape if self.is_shared else (num_samples, *self.shape), dtype=self.dtype)


@dataclass(frozen=True)
class BatchShape:
    """How inputs of a model look, for any number of samples."""

    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Argument of forward to the shape of one sample and the dtype."""
    tokens_per_sample: int
    has_labels: bool
    """Whether the model takes labels and returns its loss."""
    others: Mapping[str, Any]
    """Arguments that are not tensors of samples, with a `_TensorShape` for each tensor inside them."""

    def in_words(self) -> str:
        """The arguments of a sample, for a message."""
        words = [f"{name} {'×'.join(map(str, shape)) or 'scalar'}" for name, (shape, _) in self.inputs.items()]
        return ", ".join([*words, *(name for name in self.others if name != "use_cache")])

    def make(self, num_samples: int) -> dict[str, Any]:
        """The arguments of a forward of `num_samples`."""
        made: dict[str, Any] = {
            name: torch.zeros(num_samples, *shape, dtype=dtype) for name, (shape, dtype) in self.inputs.items()
        }
        return {
            **made,
            **tree_map(lambda one: one.make(num_samples) if isinstance(one, _TensorShape) else one, self.others),
        }


def batch_shape(model: nn.Module, *, sequence: int | None = None, example: Any = None) -> BatchShape:
    """The inputs of a model: those of `example`, whose first dim is the batch, or made from its first layer.

    `sequence` is the number of tokens of a sample. Raises InvalidArgument, with what to give, if none can be made.
    """
    if example is not None:
        return _from_example(model, example)
    if is_from_transformers(model):
        return _from_config(model, sequence)
    return _from_first_layer(model, sequence)


def _from_example(model: nn.Module, example: Any) -> BatchShape:
    """A tensor whose first dim is that of the first one grows with the samples; all others are the same for them."""
    named = named_inputs(model, example)
    leaves = [leaf for leaf in tree_leaves(named) if isinstance(leaf, Tensor)]
    count = next((leaf.shape[0] for leaf in leaves if leaf.dim()), None)
    if count is None:
        raise InvalidArgument(
            "the example has no tensor with samples", hint="return (model, (inputs,)) or (model, {name: tensor})"
        )

    def shape_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_shared = not leaf.dim() or leaf.shape[0] != count
        return _TensorShape(tuple(leaf.shape if is_shared else leaf.shape[1:]), leaf.dtype, is_shared)

    shapes = tree_map(shape_of, named)
    found = [leaf for leaf in tree_leaves(shapes) if isinstance(leaf, _TensorShape) and not leaf.is_shared]
    length = next((one.shape[0] for one in found if len(one.shape) == 1 and not one.dtype.is_floating_point), 1)
    inputs = {
        name: (one.shape, one.dtype)
        for name, one in shapes.items()
        if isinstance(one, _TensorShape) and not one.is_shared
    }
    others = {name: one for name, one in shapes.items() if name not in inputs}
    return BatchShape(inputs, length, has_labels="labels" in inputs, others=without_cache(model, others))


def _from_config(model: Any, sequence: int | None) -> BatchShape:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = getattr(model.config, "image_size", None) or _IMAGE
        height, width = size if isinstance(size, tuple | list) else (size, size)
        dtype = next(param.dtype for param in model.parameters())
        image = {"pixel_values": ((getattr(model.config, "num_channels", 3), height, width), dtype)}
        return BatchShape(image, 1, has_labels=False, others={})
    limit = next(
        (
            getattr(config, name)
            for name in ("max_position_embeddings", "n_positions", "n_ctx")
            if (getattr(config, name, None) or 0) > 0  # below 0: no limit
        ),
        None,
    )
    length = _checked_length(sequence, limit)
    ids = ((length,), torch.int64)
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"input_ids": ids}
    if getattr(model, "main_input_name", "") == "input_features" and hasattr(config, "max_source_positions"):
        # A spectrum, of which the first layers take every second frame.
        length = _checked_length(sequence, getattr(config, "max_target_positions", None))
        ids = ((length,), torch.int64)
        frames = (config.num_mel_bins, 2 * config.max_source_positions)
        inputs = {"input_features": (frames, next(param.dtype for param in model.parameters()))}
    if getattr(model.config, "is_encoder_decoder", False) and takes(model, "decoder_input_ids"):
        inputs["decoder_input_ids"] = ids
    has_labels = takes(model, "labels") and _labels_are_tokens(model)
    if has_labels:
        inputs["labels"] = ids
    return BatchShape(inputs, length, has_labels=has_labels, others=without_cache(model, {}))


def _labels_are_tokens(model: nn.Module) -> bool:
    name = type(model).__name__
    return any(word in name for word in ("CausalLM", "LMHead", "ConditionalGeneration", "MaskedLM"))


def _checked_length(sequence: int | None, limit: int | None) -> int:
    if sequence is not None and limit and sequence > limit:
        raise InvalidArgument(
            f"a sequence of {sequence} tokens is longer than the model's {limit} positions",
            hint=f"take --sequence {limit} or less, or build the model for longer sequences",
        )
    return sequence or min(limit or _LENGTH, 2048)


def _from_first_layer(model: nn.Module, sequence: int | None) -> BatchShape:
    """Tokens for an embedding, an image for a convolution, features for a linear layer."""
    wanted = [
        one.name
        for one in inspect.signature(model.forward).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    named = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
    first = next(((n, m) for n, m in named if isinstance(m, nn.Embedding | nn.Linear | _CONVOLUTIONS)), None)
    if len(wanted) != 1 or first is None:
        raise InvalidArgument(
            f"no inputs can be made for {type(model).__name__}: its forward takes {', '.join(wanted) or 'no argument'}",
            hint="let the function return (model, example): a tuple of inputs, or a mapping of the arguments of"
            " forward, of one sample or more",
        )
    _, layer = first
    dtype = layer.weight.dtype
    if isinstance(layer, nn.Embedding):
        tables = [m.num_embeddings for n, m in named if isinstance(m, nn.Embedding) and n.split(".")[-1] in POSITIONS]
        length = _checked_length(sequence, min(tables, default=None) if tables else None)
        return BatchShape({wanted[0]: ((length,), torch.int64)}, length, has_labels=False, others={})
    if isinstance(layer, nn.Linear):
        return BatchShape({wanted[0]: ((layer.in_features,), dtype)}, 1, has_labels=False, others={})
    size = (layer.in_channels, *(_IMAGE,) * (layer.weight.dim() - 2))
    return BatchShape({wanted[0]: (size, dtype)}, 1, has_labels=False, others={})


_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d


def loss_of_output(out: Any, shape: BatchShape) -> tuple[Tensor, str]:
    """A loss of a model's output, and what it is: the model's own, cross-entropy of logits, or a mean of squares."""
    own = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own, "the model's own loss"
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    first = logits if isinstance(logits, Tensor) else next(one for one in tree_leaves(out) if isinstance(one, Tensor))
    if first.dim() >= 2:
        flat = first.reshape(-1, first.shape[-1])
        targets = torch.zeros(flat.shape[0], dtype=torch.int64)
        return functional.cross_entropy(flat, targets), "cross-entropy of the output (assumed)"
    return (first.float() ** 2).mean(), "a mean of squares of the output (assumed)"
