"""Context parallelism: every rank has some positions of every sequence; attention runs in a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, TensorShapeMismatch
from torsh_distributed.parallel.context.attention_heads import heads_attention
from torsh_distributed.parallel.context.attention_ring import ring_attention
from torsh_distributed.parallel.context.positions import (
    Form,
    PositionMask,
    choose_form,
    positions_of,
    take_positions,
)
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts
from torsh_distributed.parallel.models.structure import is_position_table

TABLES = ("cos", "sin", "cos_cached", "sin_cached", "freqs_cis", "freqs_cos", "freqs_sin", "rope_cache")
"""Names of buffers with a row for each position, as in rotary embeddings."""


class ContextParallel:
    """Lets a model written for whole sequences run on this rank's positions only.

    For models whose attention is `scaled_dot_product_attention` and whose positions come from an embedding (`position`,
    `wpe`, …) or from buffers with a row for each position (`tables`: their names; default: the usual ones). Every rank
    of the group creates one and uses it like this::

        part = context.take(batch)
        with context.attending():
            loss = loss_fn(model(part_inputs), part_targets)
            loss.backward()

    The mean of the ranks' losses and gradients is that of the whole sequence. `is_part`: `model` is a pipeline stage of
    a model that `require_positions` has checked; the positions may be in another stage.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        tables: tuple[str, ...] | None = None,
        is_part: bool = False,
        form: Form = "auto",
    ) -> None:
        self.group = group
        if tables is None and not is_part:
            require_positions(model, cp=group.size())
        self._tables = _find_tables(model, tables)
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._to_positions) for module in _position_embeddings(model)
        ]
        self._is_inside = False
        self._length: int | None = None
        self._form = form
        self.labels = LabelRule()
        """Which labels the loss counts."""
        self.counts: PartCounts | None = None
        """What else it counts, in place of them."""
        self.weight: Tensor | None = None
        """What the loss of the batch taken last is multiplied by, so the mean over the ranks is that of all labels."""

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def take(self, batch: Any, *, has_loss_fn: bool = False) -> Any:
        """This rank's positions of every tensor with a sequence (dim 1) in a nested batch.

        `has_loss_fn`: the batch is (inputs, targets); where targets of -100 do not count, `weight` says what the rest
        is worth.
        """
        self._length, self.weight = None, None
        part = self._mapped(batch, self._part)
        if self.counts is not None and self.counts.count is not None:
            everyone = [self._mapped(batch, partial(self._part, rank=rank)) for rank in range(self.group.size())]
            self.weight = self.counts.share_of(part, everyone)
            part = self.counts.guarded(part)
        elif has_loss_fn:
            inputs, targets = part
            self.weight = self.labels.share_of(targets, batch[1], self.group.size())
            is_mean = self.weight is not None and not self.labels.is_sum
            part = (inputs, self.labels.with_a_label(targets) if is_mean else targets)
        if self._is_inside:
            self._replace_tables()
        return part

    def _part(self, tensor: Tensor, *, rank: int | None = None) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        length = tensor.shape[1]
        if self._length is not None and length != self._length:
            raise TensorShapeMismatch(
                "the sequences of a batch differ in length, so they cannot be split equally",
                hint="give inputs and targets the same length along dim 1",
                lengths=(self._length, length),
            )
        self._length = length
        of = self.group.rank() if rank is None else rank
        return take_positions(tensor, 1, length=length, rank=of, size=self.group.size())

    def _mapped(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, Mapping):
            return {key: self._mapped(one, change) for key, one in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._mapped(one, change) for one in value)
        return value

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Around forward and backward: attention runs in the ring, tables have only this rank's rows."""
        self._is_inside = True
        try:
            self._replace_tables()
            with _SplitMode(self.group, self._form):
                yield
        finally:
            self._is_inside = False
            for owner, name in self._tables:
                owner.__dict__.pop(name, None)

    def _replace_tables(self) -> None:
        """Let the model see only this rank's rows of the tables, for the batch taken last.

        An instance attribute hides the buffer of that name from the model's code only: code that broadcasts or saves
        buffers still sees the whole table.
        """
        for owner, name in self._tables:
            owner.__dict__[name] = self._rows(name, owner._buffers[name])

    def _rows(self, name: str, table: Tensor | None) -> Tensor | None:
        if table is None or self._length is None:
            return table
        if table.shape[0] < self._length:
            raise TensorShapeMismatch(
                f"the table {name} has rows for {table.shape[0]} positions, but the sequence has {self._length}",
                hint="make the table longer; its first dim must be the positions",
            )
        return take_positions(table, 0, length=self._length, rank=self.group.rank(), size=self.group.size())

    def _to_positions(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Map positions counted from 0 on this rank to those in the whole sequence."""
        if not self._is_inside:
            return None
        places = inputs[0]
        total = places.shape[-1] * self.group.size()
        positions = positions_of(total, rank=self.group.rank(), size=self.group.size()).to(places.device)
        return (positions[places],)


class _SplitMode(TorchFunctionMode):
    """While active, replaces scaled_dot_product_attention by attention over split sequences."""

    def __init__(self, group: dist.ProcessGroup, form: Form) -> None:
        super().__init__()
        self._attend = partial(_attend, group, form)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    group: dist.ProcessGroup,
    form: Form,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask = PositionMask(is_causal=is_causal)
    length = query.shape[-2] * group.size()
    chosen = choose_form(form, heads=query.shape[-3], size=group.size(), length=length, mask=mask)
    if attn_mask is not None or (dropout_p > 0 and chosen == "ring"):
        raise FeatureNotAvailable(
            "attention over split sequences supports no custom masks, and in a ring no dropout",
            hint="use is_causal, and dropout 0 in attention, or set mesh.cp = 1",
            has_mask=attn_mask is not None,
            dropout_p=dropout_p,
        )
    if isinstance(query, DTensor):
        # Heads are split over another axis: each rank attends with its own.
        assert isinstance(key, DTensor), "the layers of one attention are split alike"
        assert isinstance(value, DTensor), "the layers of one attention are split alike"
        q, k, v = (one.redistribute(placements=query.placements).to_local() for one in (query, key, value))
        out = _attend(
            group, form, q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return DTensor.from_local(out, query.device_mesh, query.placements, run_check=False)
    if chosen == "ulysses" and query.dim() == 4:
        return heads_attention(query, key, value, group=group, mask=mask, scale=scale, dropout_p=dropout_p)
    return ring_attention(query, key, value, group=group, mask=mask, scale=scale)


def require_positions(model: nn.Module, *, cp: int) -> None:
    """Raise ConfigurationError unless a table of positions is found in the model."""
    if not _find_tables(model, None) and not _position_embeddings(model):
        raise ConfigurationError(
            f"mesh.cp {cp}: no table of positions was found in the model",
            hint="name the buffers with a row for each position: ContextParallel(model, group, tables=(…)); an"
            " empty tuple means that the model has none",
            looked_for=TABLES,
        )


def _position_embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if is_position_table(name, module)]


def _find_tables(model: nn.Module, names: tuple[str, ...] | None) -> list[tuple[nn.Module, str]]:
    """Owner and name of each table of positions."""
    found = [
        (owner, name)
        for owner in model.modules()
        for name in owner._buffers
        if name in (TABLES if names is None else names)
    ]
    missing = sorted(set(names or ()) - {name for _, name in found})
    if missing:
        raise ConfigurationError(
            f"the model has no buffer {missing[0]}",
            hint="use the names passed to register_buffer(name, …)",
            buffers=[name for name, _ in model.named_buffers()],
            key="mesh.cp",
        )
    return found
