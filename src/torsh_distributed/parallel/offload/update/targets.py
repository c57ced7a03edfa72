"""What the offloaded optimizer updates: units of the pager, or parameters that stay where they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.offload.paging.pager import Pager
from torsh_distributed.parallel.offload.paging.units import ParamRange, Unit
from torsh_distributed.parallel.offload.storage.tiered_storage import StatePiece, StoredArray


class UpdateTarget(ABC):
    """Flat values with gradients, updated piece by piece."""

    pieces: Sequence[StatePiece]
    param_ranges: Sequence[ParamRange]
    """The trained parameters, in order."""

    def prepare(self) -> None:  # noqa: B027 (only parameters that other code may move need it)
        """Called before every update."""

    def prefetch(self, piece: StatePiece) -> None:  # noqa: B027 (only files are read ahead)
        """Called while another piece is updated: this one follows."""

    @abstractmethod
    def has_grad(self, position: int) -> bool:
        """Whether the parameter at `position` of `param_ranges` has a gradient in this step."""

    @abstractmethod
    def grad(self, piece: StatePiece) -> Tensor:
        """The gradients of a piece, 1-D, of any dtype and device; the caller does not change them."""

    def host_copy(self, piece: StatePiece) -> Tensor | None:
        """The rounded copy on the host that is updated together with the master values, if there is one."""
        return None

    @abstractmethod
    def publish(self, piece: StatePiece, values: Tensor) -> None:
        """Make the new values (1-D fp32) visible to forward and backward; `host_copy` already has them."""


class UnitTarget(UpdateTarget):
    """A unit of the pager."""

    def __init__(self, unit: Unit, pieces: Sequence[StatePiece], pager: Pager, *, held: Collection[int]) -> None:
        self.unit = unit
        self.pieces = [piece for piece in pieces if piece.is_trained]
        # Positions in the unit; parameters that the optimizer does not hold (`held`: ids) are never updated.
        self._positions = [n for n in range(unit.num_trainable) if id(unit.param_ranges[n].param) in held]
        self.param_ranges = [unit.param_ranges[n] for n in self._positions]
        self._pager = pager

    @override
    def has_grad(self, position: int) -> bool:
        return self._positions[position] in self.unit.present

    @override
    def grad(self, piece: StatePiece) -> Tensor:
        if isinstance(piece.grad, StoredArray):
            view = piece.grad.view()
            assert view is not None, "gradients are stored as plain numbers"
            return view
        assert self.unit.grad is not None, "called only if there is one"
        return self.unit.grad[piece.start : piece.stop]

    @override
    def host_copy(self, piece: StatePiece) -> Tensor | None:
        if not isinstance(piece.param, StoredArray) or piece.param is piece.master:
            return None
        view = piece.param.view()
        assert view is not None, "a copy for fetching is stored as plain numbers"
        return view

    @override
    def publish(self, piece: StatePiece, values: Tensor) -> None:
        copy = self.host_copy(piece)
        if copy is not None:
            assert isinstance(piece.param, StoredArray)
            piece.param.allocation.drop_pages()
        self._pager.refresh(self.unit, piece.start, values if copy is None else copy)


class ParamTarget(UpdateTarget):
    """One parameter that offload does not move: plain, in DDP, or this rank's shard of a DTensor (FSDP2)."""

    def __init__(self, name: str, param: nn.Parameter, pieces: Sequence[StatePiece], *, is_in_place: bool) -> None:
        self._param = param
        self._is_in_place = is_in_place
        self.pieces = pieces
        local = local_of(param)
        self.param_ranges = [ParamRange(name, param, 0, local.shape)]

    @override
    def prepare(self) -> None:
        """If the parameter is updated in place, find where it is now."""
        for piece in self.pieces:
            if self._is_in_place and isinstance(piece.master, Tensor):
                piece.master = flat_of(self._param)[piece.start : piece.stop]

    @override
    def has_grad(self, position: int) -> bool:
        return self._param.grad is not None

    @override
    def grad(self, piece: StatePiece) -> Tensor:
        assert self._param.grad is not None, "called only if there is one"
        return local_of(self._param.grad).reshape(-1)[piece.start : piece.stop]

    @override
    def publish(self, piece: StatePiece, values: Tensor) -> None:
        target = flat_of(self._param)[piece.start : piece.stop]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values, non_blocking=True)


def flat_of(param: nn.Parameter) -> Tensor:
    """This rank's part of a parameter as a 1-D view."""
    local = local_of(param.detach())
    if not local.is_contiguous():
        raise InvalidArgument(
            "offload supports contiguous parameters only",
            hint="call .contiguous() on the parameter",
            shape=tuple(local.shape),
        )
    return local.view(-1)


def is_updatable_in_place(tensor: Tensor) -> bool:
    """Whether the host can update the parameter itself, without a copy."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32
