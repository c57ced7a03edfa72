"""Logits that are not computed until it is known what for: cross-entropy takes them in chunks, anything else whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.models.wrapping import pieces_of, repeated_layers
from torsh_distributed.parallel.torch_internals import tree_map_only
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.speed_rules import can_fuse_loss
from torsh_distributed.train.speed.linear_cross_entropy import linear_cross_entropy
from torsh_distributed.train.torch_internals import DisableTorchFunctionSubclass

_RESHAPING = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}
_SAME = {Tensor.contiguous, Tensor.float}
"""What leaves the values as they are: the loss is computed in fp32 in any case."""
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "requires_grad")
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
}
"""What is known without values."""
LARGE_HEAD = 16_384
"""Classes from which on `auto` defers: below, whole logits are no more than a layer's activations."""


class DeferredLogits(Tensor):
    """The output of a linear head, of which only the inputs are kept.

    Views that leave classes together, slices of tokens and `float()` stay deferred; `cross_entropy` computes the loss
    without the logits. Any other use computes them, once, and continues with a plain tensor. After an update they
    would be those of other weights: then both are refused.
    """

    _hidden: Tensor
    _weight: Tensor
    _bias: Tensor | None
    _compute_dtype: torch.dtype
    _whole: Tensor | None
    _head: DeferredHead | None
    _num_updates: int

    @staticmethod
    def __new__(
        cls: type[Self],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        compute_dtype: torch.dtype,
        dtype: torch.dtype,
        head: DeferredHead | None = None,
    ) -> Self:
        """Logits of `hidden`: products in `compute_dtype`, and of this `dtype` to those who ask."""
        shape = (*hidden.shape[:-1], weight.shape[0])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made._hidden, made._weight, made._bias = hidden, weight, bias
        made._compute_dtype, made._whole = compute_dtype, None
        made._head, made._num_updates = head, 0 if head is None else head.num_updates
        assert isinstance(made, cls)
        return made

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        with DisableTorchFunctionSubclass():
            return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def whole(self) -> Tensor:
        """The logits themselves."""
        if self._whole is None:
            self.require_current()
            if self._head is not None:
                self._head.was_asked = True
            kind = self._hidden.device.type
            with torch.autocast(kind, enabled=False):
                dtype = self._compute_dtype
                bias = None if self._bias is None else self._bias.to(dtype)
                logits = functional.linear(self._hidden.to(dtype), self._weight.to(dtype), bias)
            with DisableTorchFunctionSubclass():
                self._whole = logits.to(self.dtype)
        return self._whole

    def require_current(self) -> None:
        """Raise InvalidArgument if the weights were updated since the forward."""
        if self._head is not None and self._head.num_updates != self._num_updates:
            raise InvalidArgument(
                "these logits were not computed before the weights were updated",
                hint="use them before the step ends, or set training.fused_loss = false",
                key="training.fused_loss",
            )

    def _with_hidden(self, hidden: Tensor, *, dtype: torch.dtype | None = None) -> DeferredLogits:
        with DisableTorchFunctionSubclass():
            own = self.dtype
        made = DeferredLogits(
            hidden,
            self._weight,
            self._bias,
            compute_dtype=self._compute_dtype,
            dtype=own if dtype is None else dtype,
            head=self._head,
        )
        made._num_updates = self._num_updates
        return made

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        if func in _FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **named)
        logits = args[0] if args else None
        deferred = _deferred(func, logits, args[1:], named) if isinstance(logits, cls) else None
        if deferred is not None:
            return deferred
        args, named = tree_map_only(cls, cls.whole, (tuple(args), dict(named)))
        return func(*args, **named)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch's is a function of C++
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Code below Python's functions, such as a C++ extension, gets the logits too."""
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def _deferred(
    func: Callable[..., Any], logits: DeferredLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """What `func` gives without the logits, or None if it needs them or somebody has made them already."""
    if logits._whole is not None:
        return None
    if func is functional.cross_entropy:
        return _loss(logits, *args, **kwargs)
    if func in _SAME:
        return logits._with_hidden(logits._hidden, dtype=torch.float32 if func is Tensor.float else None)
    if func in _RESHAPING:
        shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
        is_kept = bool(shape) and shape[-1] == logits.shape[-1]
        return logits._with_hidden(logits._hidden.reshape(*shape[:-1], -1)) if is_kept else None
    if func is Tensor.__getitem__ and _leaves_classes(args[0], logits.dim()):
        return logits._with_hidden(logits._hidden[args[0]])
    return None


def _leaves_classes(index: Any, num_dims: int) -> bool:
    """Whether an index selects tokens and leaves the last dim alone."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, int | slice) or part is Ellipsis for part in parts):
        return False
    all_of_it = slice(None)
    is_whole = parts[-1] == all_of_it if Ellipsis in parts or len(parts) == num_dims else len(parts) < num_dims
    return is_whole and parts[-1] is not Ellipsis


def _loss(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`cross_entropy` in its usual form; None for class weights, smoothing, losses of single tokens and the like."""
    is_usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    is_class_numbers = logits.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if not is_usual or not is_class_numbers or reduction not in ("mean", "sum"):
        return None
    logits.require_current()
    with torch.autocast(logits.device.type, dtype=logits._compute_dtype, enabled=_is_low(logits._compute_dtype)):
        return linear_cross_entropy(
            logits._hidden,
            logits._weight,
            target.to(logits._hidden.device),
            bias=logits._bias,
            ignore_index=ignore_index,
            reduction=reduction,
        )


def _is_low(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


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


def should_defer(model: nn.Module, plan: Plan, device: torch.device) -> bool:
    """Whether the plan wants the model's logits deferred; `auto` does on a GPU, for a large head that can be."""
    if plan.training.fused_loss != "auto":
        return plan.training.fused_loss
    is_possible = device.type == "cuda" and can_fuse_loss(plan) and has_large_head(model)
    # A head that is gathered by itself is gone when the loss is computed.
    return is_possible and not (plan.mesh.shard > 1 and is_head_apart(model, plan))


def has_large_head(model: nn.Module) -> bool:
    """Whether the model has one plain linear head, of so many classes that `auto` defers its logits."""
    found = find_head(model)
    if found is None:
        return False
    head = found[1]
    return type(head) is nn.Linear and "forward" not in vars(head) and head.out_features >= LARGE_HEAD


def is_head_apart(model: nn.Module, plan: Plan) -> bool:
    """Whether shards would gather the head by itself, or with a part of the model."""
    found = find_head(model)
    names = pieces_of(model, plan.fsdp)
    return found is not None and any(found[0] == piece or found[0].startswith(f"{piece}.") for piece in names)


def defer_logits(model: nn.Module, *, stops_if_asked: bool = False) -> DeferredHead:
    """Let the model's head return DeferredLogits, in place. Refuses a model without one head.

    `stops_if_asked`: only where gradients are computed, and no more once anything has asked for the logits.
    """
    found = find_head(model)
    if found is None:
        raise ConfigurationError(
            f"training.fused_loss: {type(model).__name__} has no linear head that can be told from its other layers",
            hint="call torsh_distributed.linear_cross_entropy(hidden, head.weight, targets) in the model's forward"
            " instead, or give the model a get_output_embeddings() that returns its head",
            key="training.fused_loss",
        )
    head = found[1]
    deferred = DeferredHead(head, stops_if_asked=stops_if_asked)
    head.forward = deferred  # type: ignore[method-assign, assignment]  # names and hooks stay
    return deferred


class DeferredHead:
    """The head's forward: keeps its input, and the weight as it is at this moment, gathered if it is sharded."""

    def __init__(self, head: nn.Linear, *, stops_if_asked: bool = False) -> None:
        self._head = head
        self._stops_if_asked = stops_if_asked
        self.was_asked = False
        """Whether anything has needed the logits themselves."""
        self.num_updates = 0
        """Updates of the weights so far."""

    def note_update(self, *_: object) -> None:
        """The weights have changed; a hook of the optimizer."""
        self.num_updates += 1

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Logits that wait; plain ones in a graph of torch.compile, and where `auto` does not defer."""
        is_stopped = self._stops_if_asked and (self.was_asked or not torch.is_grad_enabled())
        if is_stopped or torch.compiler.is_compiling():
            logits: Tensor = type(self._head).forward(self._head, hidden, *args, **kwargs)
            return logits
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._head.weight.dtype
        weight, bias = self._head.weight, self._head.bias
        return DeferredLogits(hidden, weight, bias, compute_dtype=dtype, dtype=dtype, head=self)
