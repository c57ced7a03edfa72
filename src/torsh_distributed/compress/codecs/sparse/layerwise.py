"""Layer-wise top-k: as many elements in all as top-k sends, divided among the layers by what each gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.base import SparseCodec
from torsh_distributed.compress.codecs.sparse.selection import largest, require_share, share_of
from torsh_distributed.compress.messages.sparse import sparse_bytes
from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.events import DecisionEvent, emit

_SAMPLE = 4096


class LayerCounts(NamedTuple):
    """How many elements each layer sends, and since which step."""

    step: int
    counts: tuple[int, ...]


class ErrorCurve(NamedTuple):
    """How a layer's error falls with the number of elements it sends, from a sample."""

    gains: Tensor
    """Energy (square) of the sampled elements, largest first, fp64: how much sending each reduces the error."""
    weight: float
    """How many elements of the layer each sampled one represents."""

    @property
    def total(self) -> float:
        """The layer's energy: its error if it sends nothing."""
        return float(self.gains.sum()) * self.weight

    def error(self, count: float) -> float:
        """The share of the layer's energy that is left out if it sends `count` elements."""
        left_out = float(self.gains[round(count / self.weight) :].sum()) * self.weight
        return left_out / self.total if self.total > 0 else 0.0


class LayerwiseCodec(SparseCodec):
    """Send the largest elements of each layer, with measured shares that together make up `share` of all elements.

    Every `every` steps each layer's error is measured as a function of what it sends. Elements are then given to the
    layer where the next one reduces the error most, until none are left. `sensitivity` says which error: 1 takes each
    layer's error relative to its own energy, so layers with small gradients count; 0 takes absolute errors, which is
    top-k over everything.

    Each rank decides for itself: its message has the same size in any case. `set_shapes` defines the layers; without it
    a gradient is one layer. Payload: as top-k's.
    """

    name = "layerwise"
    is_deterministic = False

    def __init__(
        self,
        share: float = 0.1,
        *,
        sensitivity: float = 1.0,
        every: int = 100,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(share, dtype=dtype)
        self.share = require_share(share)
        if not 0 <= sensitivity <= 1 or every < 1:
            raise InvalidArgument(
                "sensitivity must be from 0 to 1, and every at least 1",
                sensitivity=sensitivity,
                every=every,
            )
        self.sensitivity = sensitivity
        self.every = every
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._divisions: dict[int, LayerCounts] = {}

    @override
    def set_shapes(self, stream: int, shapes: Sequence[Sequence[int]]) -> None:
        sizes = tuple(math.prod(shape) for shape in shapes)
        if self._sizes.get(stream) != sizes:
            self._sizes[stream] = sizes
            known = self._divisions.get(stream)
            if known is not None and not _fits(known.counts, sizes):
                del self._divisions[stream]

    @override
    def select(self, x: Tensor, key: Key) -> Tensor:
        sizes = self._sizes.get(key.stream, (x.numel(),))
        if sum(sizes) != x.numel():
            raise TensorShapeMismatch(
                f"the shapes of stream {key.stream} have {sum(sizes)} elements, the gradient {x.numel()}",
                hint="call set_shapes with the shapes of the tensors in this gradient",
            )
        budget = share_of(self.share, x.numel())
        if budget < len(sizes):  # less than one element for each layer
            return largest(x, budget)
        division = self._divisions.get(key.stream)
        if division is None or not 0 <= key.step - division.step < self.every:
            division = self._decide(x, sizes, budget, key)
        places, start = [], 0
        for numel, count in zip(sizes, division.counts, strict=True):
            places.append(largest(x[start : start + numel], count) + start)
            start += numel
        return torch.cat(places)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return sparse_bytes(num_elements, share_of(self.share, num_elements), self.dtype)

    @override
    def contraction(self, num_elements: int) -> float | None:
        # Every layer sends at least its largest element, which holds its share of the layer's energy.
        return None if num_elements == 0 else (1 - 2**-20) / num_elements

    def counts(self, stream: int) -> tuple[int, ...] | None:
        """How many elements each layer of a stream sends now; None before the first message."""
        division = self._divisions.get(stream)
        return None if division is None else division.counts

    def _decide(self, x: Tensor, sizes: tuple[int, ...], budget: int, key: Key) -> LayerCounts:
        curves = [measure_curve(layer) for layer in x.split_with_sizes(list(sizes))]
        counts = divide_budget(curves, sizes, budget, self.sensitivity)
        division = self._divisions[key.stream] = LayerCounts(key.step, counts)
        layers = [layer for layer, numel in enumerate(sizes) if numel]
        shares = [counts[layer] / sizes[layer] for layer in layers]
        before = sum(curves[layer].error(self.share * sizes[layer]) for layer in layers) / len(layers)
        after = sum(curves[layer].error(counts[layer]) for layer in layers) / len(layers)
        emit(
            DecisionEvent(
                subject="compress.layerwise",
                choice=f"shares from {min(shares):.3g} to {max(shares):.3g} for {len(layers)} layers,"
                f" {budget} of {x.numel()} elements in all (stream {key.stream}, step {key.step})",
                reason=f"measured on samples, layers leave out {after:.1%} of their energy on average;"
                f" a share of {self.share:.3g} for each would leave out {before:.1%}",
            )
        )
        return division

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "divisions": {
                str(stream): {"step": division.step, "counts": list(division.counts)}
                for stream, division in self._divisions.items()
            }
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        divisions = {
            int(stream): LayerCounts(known["step"], tuple(known["counts"]))
            for stream, known in state["divisions"].items()
        }
        self._divisions = {
            stream: division
            for stream, division in divisions.items()
            if stream not in self._sizes or _fits(division.counts, self._sizes[stream])
        }

    @override
    def reset(self) -> None:
        super().reset()
        self._divisions.clear()


def _fits(counts: Sequence[int], sizes: Sequence[int]) -> bool:
    return len(counts) == len(sizes) and all(count <= numel for count, numel in zip(counts, sizes, strict=True))


def measure_curve(layer: Tensor) -> ErrorCurve:
    """The error curve of a layer, from a sample of a few thousand elements."""
    sample = layer[:: layer.numel() // _SAMPLE | 1].double()
    gains = sample.square().sort(descending=True).values.cpu()
    return ErrorCurve(gains, layer.numel() / max(1, sample.numel()))


def divide_budget(
    curves: Sequence[ErrorCurve], sizes: Sequence[int], budget: int, sensitivity: float
) -> tuple[int, ...]:
    """How many elements each layer sends: `budget` in all, at least one each, none more than it has.

    Gains fall along every curve, so taking the largest gains of all curves until the budget is used gives the least
    error: the greedy solution of the knapsack problem, optimal here up to the rounding of samples.
    """
    scaled = [curve.gains / max(curve.total, 1e-300) ** sensitivity for curve in curves]
    owners = torch.cat([torch.full((gains.numel(),), layer) for layer, gains in enumerate(scaled)])
    weights = torch.tensor([curve.weight for curve in curves], dtype=torch.float64)[owners]
    order = torch.cat(scaled).argsort(descending=True, stable=True)
    taken = weights[order].cumsum(0) <= budget
    wanted = torch.zeros(len(curves), dtype=torch.float64).index_add_(0, owners[order][taken], weights[order][taken])
    counts = [min(max(round(float(want)), 1), numel) if numel else 0 for want, numel in zip(wanted, sizes, strict=True)]
    return tuple(_settled(counts, sizes, budget))


def _settled(counts: list[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Make the counts add up to the budget: reduce the largest, or raise those with most room."""
    while (missing := budget - sum(counts)) != 0:
        if missing > 0:
            layer = max(range(len(counts)), key=lambda layer: sizes[layer] - counts[layer])
            counts[layer] += min(missing, sizes[layer] - counts[layer])
        else:
            layer = max(range(len(counts)), key=counts.__getitem__)
            counts[layer] -= min(-missing, counts[layer] - 1)
    return counts
