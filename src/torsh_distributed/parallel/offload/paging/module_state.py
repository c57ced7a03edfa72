"""`state_dict` and `load_state_dict` of a model with offloaded parameters: whole tensors, read from storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torsh_distributed.parallel.offload.paging.pager import Pager, load_flat
from torsh_distributed.parallel.offload.paging.unit_gradients import UnitGradients
from torsh_distributed.parallel.offload.paging.units import ParamRange, Unit
from torsh_distributed.parallel.offload.storage.tiered_storage import (
    StatePiece,
    StoredArray,
    TieredStorage,
    is_fp32_in_place,
    overlaps,
    read,
    write,
)
from torsh_distributed.parallel.torch_internals import _current_graph_task_id, tree_leaves


class PagingHooks:
    """Fetch each unit before its forward and backward, release it after.

    In backward a unit is done when all its gradients, or those of its inputs, are computed; units for which neither
    happens are released at the end of backward. A forward inside backward is recomputation: its unit is still needed.
    """

    def __init__(self, pager: Pager, gradients: UnitGradients) -> None:
        self._pager = pager
        self._gradients = gradients
        self._handles: list[RemovableHandle] = []
        self._is_end_queued = False
        for unit in pager.units:
            self._handles.append(
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True)
            )
            self._handles.append(
                unit.module.register_forward_hook(
                    partial(self._after_forward, unit), with_kwargs=True, always_call=True
                )
            )
            for position in range(unit.num_trainable):
                param = unit.param_ranges[position].param
                hook = partial(self._after_grad, unit, position)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if not _is_in_backward():
            self._is_end_queued = False  # a backward that raised did not reach its end
        self._pager.demand(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _is_in_backward():
            return
        if torch.is_grad_enabled():
            _hook_tensors(output, partial(self._before_backward, unit))
            self._hook_inputs(unit, (args, kwargs))
        self._pager.release(unit)

    def _before_backward(self, unit: Unit, grad: Tensor) -> None:
        # The end is queued by the first gradient of a parameter: a forward may have a backward of its own, for the
        # gradient of an input, and gradients are averaged once.
        self._pager.demand(unit)

    def _hook_inputs(self, unit: Unit, tree: Any) -> None:
        """Release the unit when the gradients of all its inputs are computed.

        Leaf inputs do not count: their gradients may be ready before the rest of the unit's backward has run.
        """
        inner = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        missing = len(inner)

        def arrived(grad: Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                self._pager.release(unit)

        _hook_tensors(list(inner.values()), arrived)

    def _after_grad(self, unit: Unit, position: int, param: Tensor) -> None:
        self._queue_end()
        if self._gradients.take(unit, position):
            self._pager.release(unit)
            self._gradients.complete(unit)

    def _queue_end(self) -> None:
        if not self._is_end_queued:
            self._is_end_queued = True
            # Called at the end of this backward; torch's DDP and FSDP use the same callback list.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_end_queued = False
        for unit in self._pager.units:
            self._pager.release(unit)
        self._gradients.end_backward()


def _is_in_backward() -> bool:
    return _current_graph_task_id() != -1


def _hook_tensors(tree: Any, hook: Callable[[Tensor], None]) -> None:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch


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

    def _give(self, names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in names:
            param = module._parameters[name]
            key = prefix + name
            if param is not None and key in state and id(param) in self._entries:
                unit, entry = self._entries[id(param)]
                state[key] = self._read(unit, entry)

    def _take(self, names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
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
