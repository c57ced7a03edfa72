"""Watches torch's loss functions while a loss is computed: what each of them averages, and over how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.models.label_share import LabelRule

_CLASSES = {functional.cross_entropy, functional.nll_loss}
_ELEMENTS = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.poisson_nll_loss,
    functional.gaussian_nll_loss,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
    functional.kl_div,
    functional.margin_ranking_loss,
}
_ROWS = {
    functional.ctc_loss,
    functional.cosine_embedding_loss,
    functional.triplet_margin_loss,
    functional.triplet_margin_with_distance_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
}
_KNOWN = _CLASSES | _ELEMENTS | _ROWS


@dataclass(frozen=True)
class LossTerm:
    """One call of a torch loss function."""

    name: str
    reduction: Literal["mean", "sum", "none"]
    count: Tensor
    """What a mean was divided by: a scalar in fp64."""
    result: Tensor
    labels: Tensor | None = None
    """The labels of a loss over classes."""
    rule: LabelRule | None = None
    """Which of them count."""


class LossTerms(TorchFunctionMode):
    """While active, notes every torch loss that is computed, and lets a mean over no label be 0 instead of NaN."""

    def __init__(self, *, scale: float = 1.0) -> None:
        """`scale`: means are multiplied by it, to see what is made of them."""
        super().__init__()
        self.terms: list[LossTerm] = []
        self._scale = scale

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func not in _KNOWN:
            return func(*args, **named)
        reduction = _reduction(named)
        result = self._noted(func, args, named, reduction)
        return result if self._scale == 1.0 or reduction != "mean" else result * self._scale

    def _noted(
        self,
        func: Callable[..., Tensor],
        args: tuple[Any, ...],
        named: Mapping[str, Any],
        reduction: Literal["mean", "sum", "none"],
    ) -> Tensor:
        if func in _CLASSES:
            return self._classes(func, args, named, reduction)
        result = func(*args, **named)
        if named.get("weight") is not None and func is functional.mse_loss:
            reduction = "none"  # divided by the sum of the weights, in a form of its own
        self.terms.append(LossTerm(func.__name__, reduction, _num_averaged(func, args, named), result))
        return result

    def _classes(
        self,
        func: Callable[..., Tensor],
        args: tuple[Any, ...],
        named: Mapping[str, Any],
        reduction: Literal["mean", "sum", "none"],
    ) -> Tensor:
        logits, target, *rest = args if len(args) > 1 else (args[0], named["target"])
        if target.is_floating_point():  # probabilities of classes: all of them count
            result = func(*args, **named)
            count = logits.numel() // logits.shape[1 if logits.dim() > 1 else 0]
            self.terms.append(LossTerm(func.__name__, reduction, _number(count, logits), result))
            return result
        weights = rest[0] if rest else named.get("weight")
        rule = LabelRule(named.get("ignore_index", -100), None if weights is None else weights.detach())
        labels = whole_of(target)
        count = rule.count(labels)
        if reduction == "mean" and labels.dim() and labels.numel() and not isinstance(target, DTensor):
            safe = rule.with_a_label(target)
            others = {key: value for key, value in named.items() if key != "target"}
            result = func(logits, safe, *rest, **others)
        else:
            result = func(*args, **named)
        self.terms.append(LossTerm(func.__name__, reduction, count, result, labels, rule))
        return result


def _reduction(named: Mapping[str, Any]) -> Literal["mean", "sum", "none"]:
    """torch's two older arguments still count before `reduction`."""
    if named.get("reduce") is False:
        return "none"
    if named.get("size_average") is False:
        return "sum"
    given = named.get("reduction", "mean")
    if given == "batchmean":
        return "mean"
    return given if given in ("mean", "sum") else "none"


def _num_averaged(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    first = args[0] if args else named["input"]
    if func is functional.ctc_loss:
        lengths = args[3] if len(args) > 3 else named["target_lengths"]
        return _number(lengths.numel() if isinstance(lengths, Tensor) else len(lengths), first)
    if named.get("reduction") == "batchmean":
        return _number(first.shape[0], first)
    if func in _ROWS:
        is_vector = func in (functional.triplet_margin_loss, functional.triplet_margin_with_distance_loss)
        rows = first.numel() // first.shape[-1] if is_vector and first.dim() else first.shape[0] if first.dim() else 1
        return _number(rows, first)
    shapes = [one.shape for one in (*args, *named.values()) if isinstance(one, Tensor)]
    whole = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # untyped in torch
    return _number(whole.numel(), first)


def _number(value: int, like: Tensor) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device=like.device)
