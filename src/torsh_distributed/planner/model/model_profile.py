"""What a model does in a step, as numbers: a record for each distinct block, and for what is before and after."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Held(StrEnum):
    """What the axes of a mesh do to bytes that a step holds."""

    SPLIT = "split"
    """Tensor parallelism gives each rank its part: between a layer split by columns and the next split by rows."""
    HIDDEN = "hidden"
    """Whole on every tensor-parallel rank, or its part of the sequence with `tensor.sequence_parallel`."""
    GATHERED = "gathered"
    """Input of a layer split by columns: whole on every tensor-parallel rank, also with sequence parallelism."""
    WEIGHTS = "weights"
    """A copy of parameters in the format of computation, made by autocast; sharded parameters have none."""


@dataclass(frozen=True)
class BatchAmount:
    """An amount that grows with the samples of a microbatch: `fixed` + `per_sample` × samples."""

    fixed: float = 0.0
    per_sample: float = 0.0

    @classmethod
    def through(cls, first: float, second: float) -> BatchAmount:
        """The line through the amounts of two samples and of three."""
        return cls(3 * first - 2 * second, second - first)

    def at(self, num_samples: float) -> float:
        """The amount for a microbatch of `num_samples`."""
        return self.fixed + self.per_sample * num_samples


HeldBytes = Mapping[Held, BatchAmount]
"""Bytes by what the axes do to them."""


@dataclass(frozen=True)
class ParamKind:
    """Parameters that every axis treats alike."""

    itemsize: int
    is_trained: bool
    is_split: bool
    """Whether tensor parallelism splits them."""
    is_expert: bool
    """Whether expert parallelism spreads them."""


@dataclass(frozen=True)
class ParamCounts:
    """Elements of parameters by kind; a parameter that two modules share counts once."""

    numel_of: Mapping[ParamKind, int] = field(default_factory=dict)
    largest_numel: int = 0
    num_tensors: int = 0
    """Trained ones."""
    _known: dict[tuple[int, int, bool], tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)

    def kinds_held(self, *, tp: int = 1, ep: int = 1) -> Iterator[tuple[ParamKind, float]]:
        """Each kind with the elements of it that one rank of these axes holds."""
        for kind, numel in self.numel_of.items():
            yield kind, numel / (tp if kind.is_split else 1) / (ep if kind.is_expert else 1)

    def numel(self, *, tp: int = 1, ep: int = 1, trained_only: bool = False) -> float:
        """Elements on one rank."""
        return self._held(tp, ep, trained_only)[0]

    def num_bytes(self, *, tp: int = 1, ep: int = 1, trained_only: bool = False) -> float:
        """Bytes on one rank."""
        return self._held(tp, ep, trained_only)[1]

    def _held(self, tp: int, ep: int, trained_only: bool) -> tuple[float, float]:
        """Elements and bytes; remembered, since a search asks for the same ones thousands of times."""
        found = self._known.get((tp, ep, trained_only))
        if found is None:
            held = [one for one in self.kinds_held(tp=tp, ep=ep) if one[0].is_trained or not trained_only]
            found = sum(numel for _, numel in held), sum(numel * kind.itemsize for kind, numel in held)
            self._known[tp, ep, trained_only] = found
        return found

    @staticmethod
    def sum_of(parts: Iterable[ParamCounts]) -> ParamCounts:
        """All of them together."""
        total: dict[ParamKind, int] = {}
        largest = num_tensors = 0
        for part in parts:
            largest = max(largest, part.largest_numel)
            num_tensors += part.num_tensors
            for kind, numel in part.numel_of.items():
                total[kind] = total.get(kind, 0) + numel
        return ParamCounts(total, largest, num_tensors)


@dataclass(frozen=True, kw_only=True)
class OperationRow:
    """Operations of a segment that are alike: what each of them does for a microbatch."""

    name: str
    """Torch's, such as addmm or gelu."""
    count: int
    flops: BatchAmount
    """Of a matrix product, a convolution or attention; 0 for all else."""
    moved: BatchAmount
    """Bytes that it reads and writes."""
    shape: tuple[BatchAmount, BatchAmount, BatchAmount, BatchAmount] | None = None
    """Of a product: how many, rows, columns, and the length of the sums; None for all else."""


@dataclass(frozen=True, kw_only=True)
class SegmentProfile:
    """A part of a step: a distinct block, or all that runs before or after the blocks. Bytes are of one microbatch."""

    name: str
    params: ParamCounts
    forward_flops: BatchAmount
    """Of matrix products, convolutions and attention: two for each multiply-add."""
    total_flops: BatchAmount
    """With backward; without recomputation."""
    forward_moved: BatchAmount
    """Bytes that its other operations read and write: what limits them is the memory, not the arithmetic."""
    backward_moved: BatchAmount
    forward_rows: tuple[OperationRow, ...]
    """All its operations."""
    backward_rows: tuple[OperationRow, ...]
    num_forward_kernels: int
    """Operations that launch a kernel."""
    num_backward_kernels: int
    saved: HeldBytes
    """Kept from forward to backward, each storage once, its own input included, without parameters."""
    selective_saved: HeldBytes
    """The results of matrix products and attention, and the input: what `selective` keeps."""
    input_bytes: BatchAmount
    """What changes from block to block: all that is kept of a block that is recomputed."""
    output_bytes: BatchAmount
    forward_live: HeldBytes
    """At its forward's peak, without input and parameters."""
    backward_live: HeldBytes
    """At its backward's peak, without input, parameters and their gradients."""
    recomputes_itself: bool = False
    """Whether the model calls it inside `torch.utils.checkpoint`, whatever the plan says."""

    def called_again(self) -> SegmentProfile:
        """The same block where it was called before: its parameters, and the copies of them, are there already."""

        def kept(amounts: HeldBytes) -> HeldBytes:
            return {held: amount for held, amount in amounts.items() if held != Held.WEIGHTS}

        saved, selective = kept(self.saved), kept(self.selective_saved)
        return dataclasses.replace(self, params=ParamCounts(), saved=saved, selective_saved=selective)


@dataclass(frozen=True, kw_only=True)
class FusedLoss:
    """Head and loss where logits exist for some tokens at a time (`training.fused_loss`)."""

    after: SegmentProfile
    """What runs after the last block, without the logits and without the buffer of the head's gradient."""
    tokens: BatchAmount
    """Of a microbatch, that have logits."""
    num_classes: int
    width: int
    """Of the hidden states that the head turns into logits."""
    itemsize: int
    """Of a logit."""
    copies_head: bool
    """Whether the head's weight is copied into the format of computation."""
    is_automatic: bool
    """Whether `auto` takes it on a GPU, for plans that leave the head whole."""
    is_apart: bool
    """Whether shards gather the head by itself, so that it is gone when the loss is computed; `auto` does not fuse
    then."""

    @property
    def head_grad_bytes(self) -> int:
        """The buffer in which the gradient of the head's weight is summed, in fp32."""
        return 4 * self.num_classes * self.width


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """All that the planner knows of a model. Made by `profile_model`; pure numbers."""

    name: str
    before: SegmentProfile
    """What runs before the first block: embeddings, a stem."""
    blocks: tuple[SegmentProfile, ...]
    """The distinct ones."""
    order: tuple[int, ...]
    """For each block in the order of the model, which of the distinct ones it is."""
    block_names: tuple[str, ...]
    after: SegmentProfile
    """What runs after the last block: norm, head, loss."""
    fused_loss: FusedLoss | None
    """The same with a fused loss, where the plan or the size of the head asks for one; None where none is possible."""
    tied_numel: int
    """Elements of parameters that `before` and `after` share; counted in `before`."""
    shared_saved: HeldBytes
    """Kept once for all blocks: masks, tables of positions, an encoder's result."""
    buffer_bytes: int
    tokens_per_sample: int
    num_experts: int
    tensor_refusal: str | None
    """Why no tensor parallelism can split the model; None if it can."""
    loss_note: str
    """What the loss is, where the model does not say."""
    computes_in: str
    """Format of the products it was traced with, as in `precision.dtype`."""
    notes: tuple[str, ...] = ()
    """What of the model is not counted as it runs, in sentences."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the model."""
        return len(self.order)

    def chain(self) -> list[SegmentProfile]:
        """The blocks in the order in which they run."""
        return [self.blocks[index] for index in self.order]

    def stage_costs(self, *, with_tables: bool) -> tuple[float, ...]:
        """What each block counts when blocks are divided into stages; `with_tables`: also those of embeddings."""
        return self._costs_with_tables if with_tables else self._costs

    @functools.cached_property
    def _costs(self) -> tuple[float, ...]:
        return self._block_costs([around.forward_flops.at(1) > 0 for around in (self.before, self.after)])

    @functools.cached_property
    def _costs_with_tables(self) -> tuple[float, ...]:
        return self._block_costs([True, True])

    def _block_costs(self, counted: list[bool]) -> tuple[float, ...]:
        costs = [1.0 + block.params.numel() for block in self.chain()]
        for around, place, is_counted in zip((self.before, self.after), (0, -1), counted, strict=True):
            if costs and is_counted:
                costs[place] += around.params.numel()
        return tuple(costs)

    def params_of(self, parts: tuple[tuple[int, int, bool, bool], ...]) -> ParamCounts:
        """The parameters of some stages: first block, one behind the last, with what is before and after all blocks."""
        if parts not in self._params_of:
            chain = self.chain()
            found = [block.params for first, end, _, _ in parts for block in chain[first:end]]
            found += [self.before.params for _, _, has_before, _ in parts if has_before]
            found += [self.after.params for _, _, _, has_after in parts if has_after]
            self._params_of[parts] = ParamCounts.sum_of(found)
        return self._params_of[parts]

    @functools.cached_property
    def _params_of(self) -> dict[tuple[tuple[int, int, bool, bool], ...], ParamCounts]:
        return {}

    @functools.cached_property
    def all_params(self) -> ParamCounts:
        """The parameters of the whole model."""
        return ParamCounts.sum_of([self.before.params, *(block.params for block in self.chain()), self.after.params])

    @functools.cached_property
    def with_fused_loss(self) -> ModelProfile:
        """The same model, whose loss is fused."""
        return self if self.fused_loss is None else dataclasses.replace(self, after=self.fused_loss.after)

    def step_flops(self, num_samples: float) -> float:
        """Forward and backward of `num_samples`, without recomputation."""
        return sum(part.total_flops.at(num_samples) for part in (self.before, *self.chain(), self.after))
