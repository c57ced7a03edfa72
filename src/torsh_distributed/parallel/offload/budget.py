"""Decides where each part of a model is stored and checks that it fits, before anything moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torsh_distributed.errors import MemoryAllocationFailed
from torsh_distributed.parallel.offload.paging.units import Unit
from torsh_distributed.parallel.offload.storage.forms import BF16, FORMS, FP32, Form, Role, plain_form
from torsh_distributed.parallel.offload.storage.tiered_storage import (
    Slot,
    StatePiece,
    StoredArray,
    TieredStorage,
    cut,
    max_numel,
)
from torsh_distributed.parallel.offload.storage.tiers import DiskTier, HostTier, MemoryBudget
from torsh_distributed.plan.sections.offload import OffloadConfig

GB = 2**30


@dataclass(frozen=True, kw_only=True)
class OffloadRules:
    """Where the parts of a unit go, from the config."""

    form: Form
    offload_params: bool
    offload_grads: bool
    device_ratio: float
    """Share of the optimizer state that stays on the device."""

    @classmethod
    def of(cls, config: OffloadConfig) -> OffloadRules:
        """The rules of a plan's `offload` section."""
        return cls(
            form=FORMS[config.cpu_compression],
            offload_params=config.params,
            offload_grads=config.grads,
            device_ratio=config.device_optimizer_ratio,
        )

    def shares_master(self, unit: Unit) -> bool:
        """Whether the fetched values are precise enough to update, so one copy suffices."""
        return unit.dtype == torch.float32 or unit.dtype == self.form.dtype

    def grad_form(self, unit: Unit) -> Form:
        """Gradients keep the dtype they are computed in; if the form is lossy, bf16, which has the range they need."""
        return plain_form(unit.dtype) if self.form.is_exact or unit.dtype != torch.float32 else BF16

    def units_with_device_state(self, units: Sequence[Unit]) -> set[int]:
        """Indices of the units whose master values, moments and gradients stay on the device: the first ones."""
        allowed = self.device_ratio * sum(unit.trainable_numel for unit in units)
        chosen = set()
        for unit in units:
            allowed -= unit.trainable_numel
            if allowed < 0:
                break
            chosen.add(unit.index)
        return chosen


def make_storage(config: OffloadConfig, device: torch.device) -> TieredStorage:
    """Storage with the tiers that a config allows."""
    is_pinned = config.pin_cpu_memory and device.type == "cuda"
    disk = None
    if config.disk_dir is not None:
        disk = DiskTier(config.disk_dir, int(config.disk_budget_gb * GB))
    return TieredStorage(HostTier(int(config.cpu_memory_budget_gb * GB), is_pinned=is_pinned), disk)


def device_bytes(unit: Unit, rules: OffloadRules, *, has_device_state: bool) -> tuple[int, int]:
    """Bytes of a unit that are always on the device, and those that are there while it is in use."""
    state = 4 * (2 if unit.dtype == torch.float32 else 3) * unit.trainable_numel if has_device_state else 0
    is_kept = has_device_state or not rules.offload_params
    keeps_grads = has_device_state or not rules.offload_grads
    fixed = state + unit.num_bytes * is_kept + unit.grad_bytes * keeps_grads
    return fixed, unit.num_bytes * (not is_kept) + unit.grad_bytes * (not keeps_grads)


def require_room_on_device(units: Sequence[Unit], rules: OffloadRules, budget: MemoryBudget) -> None:
    """Raise MemoryAllocationFailed unless the largest unit in use fits beside what always stays on the device."""
    with_state = rules.units_with_device_state(units)
    needs = {unit.index: device_bytes(unit, rules, has_device_state=unit.index in with_state) for unit in units}
    fixed = sum(always for always, _ in needs.values())
    # The root unit is in use together with every other one.
    own = sum(needs[unit.index][1] for unit in units[:1] if unit.is_root)
    others = [unit for unit in units if not unit.is_root] or list(units)
    largest = max(others, key=lambda unit: needs[unit.index][1])
    working = needs[largest.index][1] + (own if not largest.is_root else 0)
    if fixed + working > budget.limit_bytes:
        raise MemoryAllocationFailed(
            f"the device budget of {budget.limit_bytes} bytes is too small for {largest.name}: in use it needs "
            f"{needs[largest.index][1]} bytes, the model's own parameters {own}, and {fixed} stay on the device",
            hint=f"set offload.gpu_memory_budget_gb to at least {(fixed + working) / GB:.6f}, make smaller units, "
            "offload more, or lower offload.device_optimizer_ratio",
            needed_bytes=fixed + working,
            budget_bytes=budget.limit_bytes,
            unit=largest.name,
        )


def stored_bytes(units: Sequence[Unit], rules: OffloadRules, form: Form) -> int | None:
    """Bytes these units take in storage in a form; None if that depends on the values."""
    rules = replace(rules, form=form)
    with_state = rules.units_with_device_state(units)
    total = 0
    for unit in units:
        if unit.index in with_state:
            continue
        for size in _entry_sizes(unit, rules):
            if size is None:
                return None
            total += size
    return total


def _entry_sizes(unit: Unit, rules: OffloadRules) -> list[int | None]:
    trained = [high - low for low, high in cut(0, unit.trainable_numel, max_numel(rules.form))]
    frozen = [high - low for low, high in cut(unit.trainable_numel, unit.numel, max_numel(rules.form))]
    is_shared, in_place = rules.shares_master(unit), _is_host_in_place(unit, rules)
    sizes: list[int | None] = []
    for numel in trained:
        if not (is_shared and not rules.offload_params):
            sizes.append((rules.form if is_shared else plain_form(unit.dtype)).num_bytes(numel))
        if not in_place and not (is_shared and rules.offload_params):
            sizes.append(rules.form.num_bytes(numel))
        sizes.extend([rules.form.num_bytes(numel)] * 2)
        if rules.offload_grads:
            sizes.append(rules.grad_form(unit).num_bytes(numel))
    if rules.offload_params:
        sizes.extend((rules.form if is_shared else plain_form(unit.dtype)).num_bytes(numel) for numel in frozen)
    return sizes


def require_room_in_storage(needs: Callable[[Form], int | None], config: OffloadConfig) -> None:
    """Raise MemoryAllocationFailed unless the state fits host memory and disk; the hint names forms that would fit.

    `needs`: bytes by the form of the state; None if they depend on the values.
    """
    form = FORMS[config.cpu_compression]
    needed = needs(form)
    host = int(config.cpu_memory_budget_gb * GB)
    disk = 0 if config.disk_dir is None else int(config.disk_budget_gb * GB)
    if needed is None or needed <= host + disk:
        return
    sizes = {name: needs(other) for name, other in FORMS.items()}
    fitting = [f"{name} ({size} bytes)" for name, size in sizes.items() if size is not None and size <= host + disk]
    raise MemoryAllocationFailed(
        f"the state needs {needed} bytes as {form.name}, but the budgets allow {host} bytes of host memory and "
        f"{disk} bytes of disk",
        hint=f"offload.cpu_compression would fit as {' or '.join(fitting)}"
        if fitting
        else "raise offload.cpu_memory_budget_gb, set offload.disk_dir, or shard the model over more ranks",
        needed_bytes=needed,
        cpu_budget_bytes=host,
        disk_budget_bytes=disk,
    )


def place_params(
    unit: Unit, values: Tensor, rules: OffloadRules, storage: TieredStorage, *, has_device_state: bool
) -> list[StatePiece]:
    """Store the values of a unit (1-D fp32, on the host); returns its pieces, which say where the values are.

    The flat tensor of a unit that stays on the device must already be filled.
    """
    bounds = [(low, high, True) for low, high in cut(0, unit.trainable_numel, max_numel(rules.form))]
    bounds += [(low, high, False) for low, high in cut(unit.trainable_numel, unit.numel, max_numel(rules.form))]
    pieces = [StatePiece(low, high, is_trained) for low, high, is_trained in bounds]
    is_shared = rules.shares_master(unit)
    for number, piece in enumerate(pieces):
        part = values[piece.start : piece.stop]
        name = f"{unit.name}, piece {number}"
        if has_device_state:
            piece.master = _device_master(unit, piece, part) if piece.is_trained else None
            continue
        is_staged = piece.is_trained and not is_shared
        if rules.offload_params or is_staged:
            form = rules.form if is_shared else plain_form(unit.dtype)
            piece.param = storage.add(f"parameters of {name}", piece.numel, role="param", form=form, is_copied=True)
            _put(storage, piece.param, part, is_copy=not is_shared)
        if not piece.is_trained:
            continue
        if _is_host_in_place(unit, rules):
            piece.master = unit.flat[piece.start : piece.stop]
        elif is_shared and rules.offload_params:
            piece.master = piece.param
        else:
            # Without a rounded copy, the master itself is copied to the device.
            label, is_copied = f"master values of {name}", piece.param is None
            piece.master = storage.add(label, piece.numel, role="param", form=rules.form, is_copied=is_copied)
            _put(storage, piece.master, part, is_copy=False)
    return pieces


def place_grads(
    unit: Unit, pieces: Sequence[StatePiece], rules: OffloadRules, storage: TieredStorage, *, has_device_state: bool
) -> None:
    """Reserve storage for the gradients that leave the device."""
    if has_device_state or not rules.offload_grads:
        return
    for number, piece in enumerate(pieces):
        if piece.is_trained:
            name = f"gradients of {unit.name}, piece {number}"
            piece.grad = storage.add(name, piece.numel, role="moment", form=rules.grad_form(unit), is_copied=True)


def place_state(
    name: str, pieces: Sequence[StatePiece], form: Form, storage: TieredStorage, *, device: torch.device | None
) -> None:
    """Reserve memory for the moments: in storage, or on `device`."""
    for number, piece in enumerate(pieces):
        if piece.is_trained:
            piece.exp_avg = _state(storage, f"exp_avg of {name}, piece {number}", piece.numel, form, device)
            piece.exp_avg_sq = _state(storage, f"exp_avg_sq of {name}, piece {number}", piece.numel, form, device)


def workspace_bytes(pieces: Sequence[StatePiece]) -> int:
    """Host memory to decode pieces in: one being updated, one being loaded, one being saved."""
    decoded = [piece.numel for piece in pieces if piece.is_trained and not piece.is_direct]
    return 3 * 3 * FP32_BYTES * max(decoded, default=0)


FP32_BYTES = FP32.dtype.itemsize


def _state(storage: TieredStorage, name: str, numel: int, form: Form, device: torch.device | None) -> Slot:
    if device is not None:
        return torch.zeros(numel, device=device)
    role: Role = "variance" if name.startswith("exp_avg_sq") else "moment"
    return storage.add(name, numel, role=role, form=form, is_optimizer_state=True)


def _is_host_in_place(unit: Unit, rules: OffloadRules) -> bool:
    """Whether the host updates the parameters themselves: they stay there as fp32, so one copy is enough."""
    on_host = unit.flat.device.type == "cpu" and unit.dtype == torch.float32
    return on_host and not rules.offload_params and rules.form.dtype == torch.float32


def _device_master(unit: Unit, piece: StatePiece, part: Tensor) -> Tensor:
    if unit.dtype == torch.float32:
        return unit.flat[piece.start : piece.stop]
    return part.to(unit.flat.device, torch.float32)


def _put(storage: TieredStorage, array: StoredArray, values: Tensor, *, is_copy: bool) -> None:
    """Store values; a copy for fetching is rounded to nearest, as casting the model would."""
    view = array.view()
    if is_copy or (view is not None and view.dtype == torch.float32):
        assert view is not None, "copies for fetching are plain numbers"
        view.copy_(values)
        array.allocation.drop_pages()
    else:
        storage.save(array, values)
