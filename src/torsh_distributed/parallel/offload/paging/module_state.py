"""`state_dict` and `load_state_dict` of a model whose parameters are away: whole tensors, as if they were there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torsh_distributed.parallel.offload.paging.pager import Pager, load_flat
from torsh_distributed.parallel.offload.paging.units import Place, Unit
from torsh_distributed.parallel.offload.storage.pieces import Piece, is_fp32_in_place, read, write
from torsh_distributed.parallel.offload.storage.tiered_storage import Entry, Store


class ModuleState:
    """Hooks on every module that owns a parameter: out comes what the store holds, in goes what is loaded."""

    def __init__(self, units: Sequence[Unit], pieces: Sequence[Sequence[Piece]], store: Store, pager: Pager) -> None:
        self._pieces = pieces
        self._store = store
        self._pager = pager
        self._places = {id(place.param): (unit, place) for unit in units for place in unit.places}
        self._handles: list[RemovableHandle] = []
        owners = {id(module): module for unit in units for module in unit.module.modules()}
        for module in owners.values():
            names = [name for name, param in module.named_parameters(recurse=False, remove_duplicate=False)]
            if names:
                on_give, on_take = module.register_state_dict_post_hook, module.register_load_state_dict_pre_hook
                self._handles.append(on_give(partial(self._give, names)))  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(on_take(partial(self._take, names)))  # type: ignore[no-untyped-call]  # torch's

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def give_back(self, unit: Unit) -> None:
        """Put plain tensors into the parameters, on the device, and empty the unit."""
        flat = load_flat(unit, self._pieces[unit.index], self._store)
        for place in unit.places:
            values = flat[place.start : place.stop].view(place.shape)
            place.param.data = values.to(unit.flat.device, unit.dtype, copy=True)

    def _give(self, names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in names:
            param = module._parameters[name]
            key = prefix + name
            if param is not None and key in state and id(param) in self._places:
                unit, place = self._places[id(param)]
                state[key] = self._read(unit, place)

    def _take(self, names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Store what is loaded, and leave torch an empty tensor to load into the empty parameter."""
        for name in names:
            param = module._parameters[name]
            values = state.get(prefix + name)
            if param is None or values is None or id(param) not in self._places:
                continue
            unit, place = self._places[id(param)]
            if values.shape == place.shape and not unit.is_in_use:
                self._write(unit, place, values.detach())
                state[prefix + name] = param.detach()

    def _read(self, unit: Unit, place: Place) -> Tensor:
        flat = torch.empty(place.shape.numel())
        for piece, low, high in self._overlaps(unit, place):
            source = piece.master if piece.master is not None else piece.param
            values = unit.flat[piece.start : piece.stop] if source is None else read(self._store, source)
            flat[low - place.start : high - place.start].copy_(values[low - piece.start : high - piece.start])
        return flat.view(place.shape).to(unit.dtype)

    def _write(self, unit: Unit, place: Place, values: Tensor) -> None:
        self._pager.begin_update()
        flat = values.reshape(-1).to("cpu", torch.float32)
        for piece, low, high in self._overlaps(unit, place):
            part = flat[low - place.start : high - place.start]
            for slot in {id(slot): slot for slot in (piece.master, piece.param) if slot is not None}.values():
                if isinstance(slot, Entry) and slot is piece.param and slot is not piece.master:
                    view = slot.view()
                    if view is not None:
                        view[low - piece.start : high - piece.start] = part.to(view.dtype)
                        continue
                held = read(self._store, slot)
                held[low - piece.start : high - piece.start] = part.to(held.device)
                write(self._store, slot, held)
            source = piece.master if piece.master is not None else piece.param
            if source is None:
                unit.flat[low:high].copy_(part)
            else:
                now = read(self._store, source)[low - piece.start : high - piece.start]
                self._pager.refresh(unit, low, now if is_fp32_in_place(source) else now.clone())
        self._pager.begin_update()

    def _overlaps(self, unit: Unit, place: Place) -> list[tuple[Piece, int, int]]:
        bounds = (
            (piece, max(piece.start, place.start), min(piece.stop, place.stop)) for piece in self._pieces[unit.index]
        )
        return [(piece, low, high) for piece, low, high in bounds if low < high]
