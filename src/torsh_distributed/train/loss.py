"""The loss of a batch: from the model itself, or from a function of its output and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch, first_line
from torsh_distributed.train.batches import Batch

LossFn = Callable[[Any, Any], Any]
"""Takes the model's output and the targets; returns a tensor with one value, or two: a sum and what it is a sum of."""


Seeing = Callable[[Any, Any], None]
"""Called with the model's outputs and the targets of a batch."""


def loss_of(model: nn.Module, batch: Batch, loss_fn: LossFn | None, *, seeing: Seeing | None = None) -> Tensor:
    """The loss of `batch`. Without `loss_fn` the model returns it, by itself or as `loss`; `seeing` is then shown its
    `logits` and the batch's `labels`, or the whole output and batch if they have none.

    If the model fails on a batch of another dtype than its parameters, the error says so.
    """
    try:
        if loss_fn is None:
            output = _call(model, batch)
            loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            if seeing is not None:
                seeing(
                    output["logits"] if isinstance(output, Mapping) and "logits" in output else output,
                    batch["labels"] if isinstance(batch, Mapping) and "labels" in batch else batch,
                )
        else:
            inputs, targets = _pair(batch)
            loss = loss_fn(_call(model, inputs), targets)
    except RuntimeError as error:
        _explain_dtype(error, model, batch)
        raise
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise InvalidArgument(
            "the loss must be a tensor with one value",
            hint="average it over the batch: loss.mean()",
            got=type(loss).__name__ if not isinstance(loss, Tensor) else tuple(loss.shape),
        )
    return loss


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _pair(batch: Batch) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise InvalidArgument(
        "with a loss_fn a batch must be a pair (inputs, targets)",
        hint="let the loader yield pairs, or leave loss_fn out and return the loss from the model",
        got=f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__,
    )


def _explain_dtype(error: RuntimeError, model: nn.Module, batch: Batch) -> None:
    """Raise TensorShapeMismatch if the batch has floating-point tensors of another dtype than the parameters."""
    own = {param.dtype for param in model.parameters() if param.is_floating_point()}
    found = {tensor.dtype for tensor in _tensors(batch) if tensor.is_floating_point()} - own
    if found and own:
        raise TensorShapeMismatch(
            "the model failed on a batch whose dtype differs from that of its parameters",
            hint="convert the data in the dataset or the collate function: x.float()",
            batch=sorted(map(str, found)),
            parameters=sorted(map(str, own)),
            error=first_line(error),
        ) from error


def _tensors(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)
