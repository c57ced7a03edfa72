"""What the offloaded optimizer updates: units whose parameters come and go, or parameters that stay where they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.offload.paging.pager import Pager
from torsh_distributed.parallel.offload.paging.units import Unit
from torsh_distributed.parallel.offload.storage.pieces import Piece
from torsh_distributed.parallel.offload.storage.tiered_storage import Entry


@dataclass(frozen=True)
class Span:
    """A parameter inside a target: elements `start` to `stop`."""

    name: str
    param: nn.Parameter
    start: int
    stop: int
    shape: torch.Size
    """Of its values on this rank."""


class Target(ABC):
    """Flat values with gradients; its pieces are updated one by one."""

    pieces: Sequence[Piece]
    spans: Sequence[Span]
    """The trained parameters, in order."""

    def prepare(self) -> None:  # noqa: B027 (only parameters that someone else may move need it)
        """Called before every update."""

    @abstractmethod
    def has_grad(self, position: int) -> bool:
        """Whether the parameter of that span has a gradient in this step."""

    @abstractmethod
    def grad(self, piece: Piece) -> Tensor:
        """The gradients of a piece, 1-D, in any dtype and on any device; the caller does not change them."""

    def host_copy(self, piece: Piece) -> Tensor | None:
        """The rounded copy on the host that follows the master values, if there is one: updated with them."""
        return None

    @abstractmethod
    def publish(self, piece: Piece, values: Tensor) -> None:
        """Let forward and backward see the new values, 1-D fp32; the host's copy, if there is one, has them already."""


class UnitTarget(Target):
    """A unit of the pager."""

    def __init__(self, unit: Unit, pieces: Sequence[Piece], pager: Pager, *, held: Collection[int]) -> None:
        self.unit = unit
        self.pieces = [piece for piece in pieces if piece.is_trained]
        # By position in the unit; what the optimizer does not hold (`held`: ids) is never updated.
        self._positions = [n for n in range(unit.num_trainable) if id(unit.places[n].param) in held]
        places = [unit.places[n] for n in self._positions]
        self.spans = [Span(place.name, place.param, place.start, place.stop, place.shape) for place in places]
        self._pager = pager

    @override
    def has_grad(self, position: int) -> bool:
        return self._positions[position] in self.unit.present

    @override
    def grad(self, piece: Piece) -> Tensor:
        if isinstance(piece.grad, Entry):
            view = piece.grad.view()
            assert view is not None, "gradients are held as plain numbers"
            return view
        assert self.unit.grad is not None, "asked for only where there is one"
        return self.unit.grad[piece.start : piece.stop]

    @override
    def host_copy(self, piece: Piece) -> Tensor | None:
        if not isinstance(piece.param, Entry) or piece.param is piece.master:
            return None
        view = piece.param.view()
        assert view is not None, "a copy for fetching is held as plain numbers"
        return view

    @override
    def publish(self, piece: Piece, values: Tensor) -> None:
        copy = self.host_copy(piece)
        if copy is not None:
            assert isinstance(piece.param, Entry)
            piece.param.region.cool()
        self._pager.refresh(self.unit, piece.start, values if copy is None else copy)


class ParamTarget(Target):
    """One parameter that someone else looks after: plain, in DDP, or this rank's shard of a DTensor (FSDP2)."""

    def __init__(self, name: str, param: nn.Parameter, pieces: Sequence[Piece], *, is_in_place: bool) -> None:
        self._param = param
        self._is_in_place = is_in_place
        self.pieces = pieces
        local = local_of(param)
        self.spans = [Span(name, param, 0, local.numel(), local.shape)]

    @override
    def prepare(self) -> None:
        """Look where the parameter lies now, if it is updated in place."""
        for piece in self.pieces:
            if self._is_in_place and isinstance(piece.master, Tensor):
                piece.master = flat_of(self._param)[piece.start : piece.stop]

    @override
    def has_grad(self, position: int) -> bool:
        return self._param.grad is not None

    @override
    def grad(self, piece: Piece) -> Tensor:
        assert self._param.grad is not None, "asked for only where there is one"
        return local_of(self._param.grad).reshape(-1)[piece.start : piece.stop]

    @override
    def publish(self, piece: Piece, values: Tensor) -> None:
        target = flat_of(self._param)[piece.start : piece.stop]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values, non_blocking=True)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat_of(param: nn.Parameter) -> Tensor:
    """This rank's part of a parameter as one run of elements, in place."""
    local = local_of(param.detach())
    if not local.is_contiguous():
        raise InvalidArgument(
            "offload updates contiguous parameters only", hint="call .contiguous() on it", shape=tuple(local.shape)
        )
    return local.view(-1)


def is_updatable_in_place(tensor: Tensor) -> bool:
    """Whether the host can update the parameter itself, without a copy of it."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32
