"""`state_dict` and `load_state_dict` of a model with offloaded parameters: whole tensors, read from storage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torsh_distributed.parallel.offload.paging.pager import Pager, load_flat
from torsh_distributed.parallel.offload.paging.units import ParamRange, Unit
from torsh_distributed.parallel.offload.storage.pieces import StatePiece, is_fp32_in_place, overlaps, read, write
from torsh_distributed.parallel.offload.storage.tiered_storage import StoredArray, TieredStorage


class ModuleState:
    """Hooks on every module that owns a parameter; they save and load the values in storage."""

    def __init__(
        self, units: Sequence[Unit], pieces: Sequence[Sequence[StatePiece]], storage: TieredStorage, pager: Pager
    ) -> None:
        self._pieces = pieces
        self._storage = storage
        self._pager = pager
        self._entries = {id(entry.param): (unit, entry) for unit in units for entry in unit.param_ranges}
        self._handles: list[RemovableHandle] = []
        owners = {id(module): module for unit in units for module in unit.module.modules()}
        for module in owners.values():
            names = [name for name, param in module.named_parameters(recurse=False, remove_duplicate=False)]
            if names:
                on_give, on_take = module.register_state_dict_post_hook, module.register_load_state_dict_pre_hook
                self._handles.append(on_give(partial(self._give, names)))  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(on_take(partial(self._take, names)))  # type: ignore[no-untyped-call]  # torch's

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def give_back(self, unit: Unit) -> None:
        """Give the unit's parameters plain tensors on the device again."""
        flat = load_flat(unit, self._pieces[unit.index], self._storage)
        for entry in unit.param_ranges:
            values = flat[entry.start : entry.stop].view(entry.shape)
            entry.param.data = values.to(unit.flat.device, unit.dtype, copy=True)

    def shape_of(self, param: Tensor) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and dtype of a parameter in use; None for one that is not stored here."""
        if id(param) not in self._entries:
            return None
        unit, entry = self._entries[id(param)]
        return entry.shape, unit.dtype

    def value_of(self, param: Tensor) -> Tensor:
        """A stored parameter, read into new memory."""
        return self._read(*self._entries[id(param)])

    def set_value(self, param: Tensor, values: Tensor) -> None:
        """Replace a stored parameter that is not in use."""
        self._write(*self._entries[id(param)], values)

    def _give(self, names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in names:
            param = module._parameters[name]
            key = prefix + name
            if param is not None and key in state and id(param) in self._entries:
                unit, entry = self._entries[id(param)]
                state[key] = self._read(unit, entry)

    def _take(self, names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Store the loaded values, and give torch an empty tensor to load into the empty parameter."""
        for name in names:
            param = module._parameters[name]
            values = state.get(prefix + name)
            if param is None or values is None or id(param) not in self._entries:
                continue
            unit, entry = self._entries[id(param)]
            if values.shape == entry.shape and not unit.is_in_use:
                self._write(unit, entry, values.detach())
                state[prefix + name] = param.detach()

    def _read(self, unit: Unit, entry: ParamRange) -> Tensor:
        flat = torch.empty(entry.shape.numel())
        for piece, low, high in overlaps(self._pieces[unit.index], entry.start, entry.stop):
            source = piece.master if piece.master is not None else piece.param
            values = unit.flat[piece.start : piece.stop] if source is None else read(self._storage, source)
            flat[low - entry.start : high - entry.start].copy_(values[low - piece.start : high - piece.start])
        return flat.view(entry.shape).to(unit.dtype)

    def _write(self, unit: Unit, entry: ParamRange, values: Tensor) -> None:
        self._pager.begin_update()
        flat = values.reshape(-1).to("cpu", torch.float32)
        for piece, low, high in overlaps(self._pieces[unit.index], entry.start, entry.stop):
            part = flat[low - entry.start : high - entry.start]
            for slot in {id(slot): slot for slot in (piece.master, piece.param) if slot is not None}.values():
                if isinstance(slot, StoredArray) and slot is piece.param and slot is not piece.master:
                    view = slot.view()
                    if view is not None:
                        view[low - piece.start : high - piece.start] = part.to(view.dtype)
                        continue
                held = read(self._storage, slot)
                held[low - piece.start : high - piece.start] = part.to(held.device)
                write(self._storage, slot, held)
            source = piece.master if piece.master is not None else piece.param
            if source is None:
                unit.flat[low:high].copy_(part)
            else:
                now = read(self._storage, source)[low - piece.start : high - piece.start]
                self._pager.refresh(unit, low, now if is_fp32_in_place(source) else now.clone())
        self._pager.begin_update()
