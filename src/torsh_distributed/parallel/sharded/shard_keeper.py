"""What FullyShardedDataParallel asks of whoever keeps its shards elsewhere between uses, such as offload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, OffloadPolicy

from torsh_distributed.parallel.torch_internals import FSDPParam


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardShape:
    """One parameter of a piece, and this rank's shard of it."""

    name: str
    numel: int
    shard_numel: int
    """Equal on all ranks: rows that do not divide evenly are padded, as FSDP2 does."""
    dtype: torch.dtype
    compute_dtype: torch.dtype
    """In which it is gathered."""
    is_trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceShape:
    """Parameters that are gathered together."""

    name: str
    params: tuple[ShardShape, ...]
    is_root: bool
    """Whether it is the model itself, which stays gathered between forward and backward."""

    @property
    def gathered_bytes(self) -> int:
        """Its whole parameters, as forward uses them."""
        return sum(param.numel * param.compute_dtype.itemsize for param in self.params)

    @property
    def grad_bytes(self) -> int:
        """Their whole gradients, as backward computes them."""
        return sum(param.numel * param.compute_dtype.itemsize for param in self.params if param.is_trained)


class ShardKeeper(ABC):
    """Keeps the shards of one model. Every rank calls its methods in the same order."""

    @abstractmethod
    def expect(self, pieces: Sequence[PieceShape], *, keeps_gathered: bool, gathered_ahead: int) -> int:
        """Before anything is sharded: raise if it does not fit; returns how many pieces may be gathered ahead.

        `keeps_gathered`: pieces stay gathered between forward and backward (ZeRO-2).
        """

    @abstractmethod
    def policy(self, piece: str) -> OffloadPolicy:
        """Where FSDP2 leaves the shards and gradients of a piece."""

    @abstractmethod
    def place(self, piece: str, module: nn.Module, *, has_values: bool) -> None:
        """Take over the shards of a piece that FSDP2 has just made, with their values if there are any yet."""

    @abstractmethod
    def begin(self, model: nn.Module) -> None:
        """All pieces are placed: the model is about to be used."""

    @abstractmethod
    def note_gather(self, piece: str) -> None:
        """The shards of a piece have been read, to be gathered."""

    @abstractmethod
    def note_reduction(self, piece: str) -> None:
        """The whole gradients of a piece are about to be reduced."""

    @abstractmethod
    def clip(self, grads: Sequence[Tensor], norm: Tensor, max_norm: float | None) -> None:
        """As `clip_to_norm`: gradients of this norm are scaled, now or when the update reads them."""


def piece_shapes(
    model: nn.Module,
    pieces: Sequence[nn.Module],
    replicated: Collection[str],
    num_shards: int,
    param_dtype: torch.dtype | None,
) -> list[PieceShape]:
    """The shapes of the pieces of a model that is not sharded yet: the model itself, then its pieces in order.

    `replicated`: names of parameters that are not sharded; `param_dtype`: in which they are gathered.
    """
    seen = {param for name, param in model.named_parameters(remove_duplicate=False) if name in replicated}
    names = {module: name for name, module in model.named_modules()}
    found = []
    for piece in [*reversed(pieces), model]:  # as they are sharded: a parameter belongs to the innermost one
        own = [(name, param) for name, param in piece.named_parameters() if param not in seen]
        seen.update(param for _, param in own)
        shapes = tuple(
            ShardShape(
                name=f"{names[piece]}.{name}" if names[piece] else name,
                numel=param.numel(),
                shard_numel=-(-param.shape[0] // num_shards) * param[0].numel() if param.shape[0] else 0,
                dtype=param.dtype,
                compute_dtype=param_dtype or param.dtype,
                is_trained=param.requires_grad,
            )
            for name, param in own
        )
        found.append(PieceShape(name=names[piece], params=shapes, is_root=piece is model))
    return found[::-1]


def shards_of(piece: nn.Module) -> Iterator[FSDPParam]:
    """FSDP2's own records of the parameters of a piece."""
    assert isinstance(piece, FSDPModule)
    group = piece._get_fsdp_state()._fsdp_param_group
    yield from () if group is None else group.fsdp_params


def is_held(piece: nn.Module) -> bool:
    """Whether the whole parameters of a piece are on the device, or on their way there."""
    assert isinstance(piece, FSDPModule)
    group = piece._get_fsdp_state()._fsdp_param_group
    return group is not None and (group._all_gather_result is not None or not group.is_sharded)
