"""Data parallelism whose parameters, gradients and optimizer state are stored off the device and fetched for use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.parallel.data.bucket_reduction import bucket_reducer
from torsh_distributed.parallel.data.replicated_params import broadcast_from_first
from torsh_distributed.parallel.mesh.mesh_reduction import HostValue, mean_over
from torsh_distributed.parallel.offload.budget import (
    GB,
    OffloadRules,
    device_bytes,
    make_storage,
    place_grads,
    place_params,
    place_state,
    require_room_in_storage,
    require_room_on_device,
    stored_bytes,
    workspace_bytes,
)
from torsh_distributed.parallel.offload.layer_times import LayerClock
from torsh_distributed.parallel.offload.offload_stats import OffloadStats
from torsh_distributed.parallel.offload.paging.module_state import ModuleState, PagingHooks
from torsh_distributed.parallel.offload.paging.pager import Forecast, Pager
from torsh_distributed.parallel.offload.paging.pressure import POLICIES, PressureRelief
from torsh_distributed.parallel.offload.paging.unit_gradients import UnitGradients
from torsh_distributed.parallel.offload.paging.units import Unit, build_units
from torsh_distributed.parallel.offload.storage.mover import mover_for
from torsh_distributed.parallel.offload.storage.tiered_storage import StatePiece
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget
from torsh_distributed.parallel.offload.update.optimizer import OffloadedOptimizer, require_adam
from torsh_distributed.parallel.offload.update.targets import UnitTarget
from torsh_distributed.parallel.state.held_state import StoredParams, StoredTensor
from torsh_distributed.parallel.state.whole_state import StateParts
from torsh_distributed.parallel.strategy import PendingNumber, Strategy, check_one_device
from torsh_distributed.plan.sections.distributed import DistributedConfig
from torsh_distributed.plan.sections.offload import OffloadConfig


class PagedDataParallel(Strategy):
    """Replicas whose parameters are on the device only while in use; gradients are averaged as they leave it.

    The model is called as before, and its `state_dict` has whole tensors, but between uses its parameters are empty.
    Train with the optimizer that `offload_optimizer` returns. Without a process group this is the only replica. Close
    it, or use it as a context manager, to give the model its parameters back, on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig,
        distributed: DistributedConfig | None = None,
        *,
        device: torch.device | str | None = None,
        compute_dtype: torch.dtype | None = None,
        units: Sequence[nn.Module] | None = None,
        group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        self._model = model
        self._config = config
        self._rules = OffloadRules.of(config)
        self._group = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
        found = check_one_device(model)
        self._device = found if device is None else torch.device(device)
        self._budget = MemoryBudget(
            "device memory", int(config.gpu_memory_budget_gb * GB), setting="gpu_memory_budget_gb"
        )
        self._optimizer: OffloadedOptimizer | None = None
        with fail_together("offload the model", self._group):
            self._units = build_units(model, self._device, compute_dtype=compute_dtype, chosen=units)
            require_room_on_device(self._units, self._rules, self._budget)
            require_room_in_storage(partial(stored_bytes, self._units, self._rules), config)
            self._storage = make_storage(config, self._device)
        self._with_state = self._rules.units_with_device_state(self._units)
        self._mover = mover_for(self._device)
        self._pieces: list[list[StatePiece]] = []
        try:
            self._move_in()
        except BaseException:
            self._mover.close()
            self._storage.close()
            raise
        forecast = Forecast(_guess(self._units), max_distance=config.prefetch_buffer_size)
        self._pager = Pager(
            self._units, self._pieces, storage=self._storage, budget=self._budget, mover=self._mover, forecast=forecast
        )
        self._gradients = UnitGradients(self._units, self._pieces, storage=self._storage, pager=self._pager)
        if self._group is not None and self._group.size() > 1:
            reducer = bucket_reducer(distributed or DistributedConfig(), self._group, self._device)
            self._gradients.average(reducer, self._group.size())
        self._relief = PressureRelief(POLICIES[config.auto_memory_management], storage=self._storage, pager=self._pager)
        self._hooks = PagingHooks(self._pager, self._gradients)
        self._clock = LayerClock({unit.name: unit.module for unit in self._units}, self._device)
        self._module_state = ModuleState(self._units, self._pieces, self._storage, self._pager)
        self._buffer_hook = None
        if broadcast_buffers and self.data_degree > 1 and any(True for _ in model.buffers()):
            self._buffer_hook = model.register_forward_pre_hook(self._share_buffers)

    def offload_optimizer(self, optimizer: Optimizer) -> OffloadedOptimizer:
        """The optimizer to use from now on, with the groups and the state of `optimizer` (Adam or AdamW)."""
        with fail_together("offload the optimizer", self._group):
            require_adam(optimizer)
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            for unit, pieces in zip(self._units, self._pieces, strict=True):
                on_device = self._device if unit.index in self._with_state else None
                place_state(unit.name, pieces, self._rules.form, self._storage, device=on_device)
            everything = [piece for pieces in self._pieces for piece in pieces]
            self._storage.host.budget.charge(workspace_bytes(everything), "room to decode pieces in")
        # State on the device first: the GPU updates it while the host updates the rest.
        order = sorted(self._units, key=lambda unit: unit.index not in self._with_state)
        targets = [UnitTarget(unit, self._pieces[unit.index], self._pager, held=held) for unit in order]
        made = OffloadedOptimizer(optimizer, targets, storage=self._storage, mover=self._mover)
        made.before_step, made.after_step, made.clear_grads = self._before_step, self._after_step, self._gradients.clear
        self._optimizer = made
        return made

    @property
    @override
    def model(self) -> nn.Module:
        return self._model

    @property
    @override
    def unwrapped(self) -> nn.Module:
        return self._model

    @property
    @override
    def data_rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    @property
    @override
    def data_degree(self) -> int:
        return 1 if self._group is None else self._group.size()

    @contextmanager
    def _accumulating(self, is_last: bool) -> Iterator[None]:
        before, self._gradients.is_syncing = self._gradients.is_syncing, is_last
        try:
            yield
        finally:
            self._gradients.is_syncing = before

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._accumulating(is_last)

    @override
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        return HostValue(loss.detach()) if self._group is None else mean_over(loss, self._group)

    @override
    def scale_gradients(self, factor: Tensor) -> None:
        raise FeatureNotAvailable(
            "accumulated passes of a loss that returns its count, or selects what it averages, need all gradients once"
            " more at the end of a step, and offload keeps them elsewhere",
            hint="set training.gradient_accumulation = 1, or training.loss_is to what the loss averages",
            feature="offload.enabled",
        )

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        total = self._gradients.norm()
        if max_norm is not None and self._optimizer is not None:
            # The update multiplies as it reads: gradients in the store are not passed over once more.
            norm = float(total)
            if norm > max_norm:
                self._optimizer.multiply_grads(float(torch.clamp(max_norm / (total + 1e-6), max=1.0)))
        return total

    @override
    def state_parts(self) -> StateParts:
        return _PagedParams(self._module_state)

    @override
    def take_comm_s(self) -> float | None:
        return None

    def stats(self) -> OffloadStats:
        """Measured statistics so far."""
        return OffloadStats.measure(
            self._storage,
            self._budget,
            update_s=0.0 if self._optimizer is None else self._optimizer.update_s,
            stall_s=self._mover.stall_s,
            layers=self._clock.times(),
            counters=self._pager.counters,
            prefetch_distance=self._pager.forecast.distance,
        )

    def close(self) -> None:
        """Give the model its parameters back, on the device, and free storage; the optimizer is unusable then."""
        if not self._units:
            return
        self._gradients.clear()
        self._pager.begin_update()
        self._hooks.remove()
        self._clock.remove()
        self._module_state.remove()
        if self._buffer_hook is not None:
            self._buffer_hook.remove()
        for unit in self._units:
            self._module_state.give_back(unit)
        self._units, self._optimizer = [], None
        self._mover.close()
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _move_in(self) -> None:
        """Move the model to storage, unit by unit so at most one unit is held twice."""
        with fail_together("offload the model", self._group):
            for unit in self._units:
                has_state = unit.index in self._with_state
                fixed, _ = device_bytes(unit, self._rules, has_device_state=has_state)
                values = torch.zeros(unit.numel)
                for entry in unit.param_ranges:
                    values[entry.start : entry.stop].copy_(entry.param.detach().reshape(-1))
                if self._group is not None and self._group.size() > 1:
                    self._share(values)
                unit.is_kept = has_state or not self._rules.offload_params
                if unit.is_kept:
                    keeps_grads = has_state or not self._rules.offload_grads
                    # Gradients are charged when they arrive.
                    self._budget.charge(
                        fixed - keeps_grads * unit.grad_bytes, f"the part of {unit.name} that stays on the device"
                    )
                    self._mover.fill(unit.flat, unit.num_bytes)
                    unit.flat.copy_(values)
                    unit.is_resident = True
                self._pieces.append(place_params(unit, values, self._rules, self._storage, has_device_state=has_state))
                unit.detach()
            for unit, pieces in zip(self._units, self._pieces, strict=True):
                place_grads(unit, pieces, self._rules, self._storage, has_device_state=unit.index in self._with_state)
        on_disk = [array for array in self._storage.arrays if array.is_on_disk]
        if on_disk:
            size, budget = sum(array.payload.numel() for array in on_disk), self._storage.host.budget.limit_bytes
            reason = f"{size} bytes of {self._storage.stored_bytes} do not fit in {budget} bytes of host memory"
            events.emit(events.DecisionEvent(subject="offload tier", choice="disk", reason=reason))
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)
        if self._group is not None:
            broadcast_from_first(list(self._model.buffers()), self._group)

    def _share(self, values: Tensor) -> None:
        """Replace `values` by those of the group's first rank, so all replicas start equal."""
        assert self._group is not None
        sent = values.to(self._device) if self._device.type == "cuda" else values
        broadcast(sent, dist.get_global_rank(self._group, 0), group=self._group)
        if sent is not values:
            values.copy_(sent)

    def _share_buffers(self, model: nn.Module, _: object) -> None:
        """In training, take buffers (running statistics) from the group's first rank, as DDP does."""
        if model.training:
            assert self._group is not None
            broadcast_from_first(list(model.buffers()), self._group)

    def _before_step(self) -> None:
        self._gradients.settle()
        self._pager.begin_update()

    def _after_step(self) -> None:
        self._relief.relieve()
        self._pager.end_step()


class _PagedParams(StoredParams):
    """Parameters in the tiers of offload, by the tensors that are empty in their place."""

    def __init__(self, module_state: ModuleState) -> None:
        self._module_state = module_state

    @override
    def stored(self, param: Tensor) -> tuple[StoredTensor, Callable[[Tensor], None]] | None:
        kind = self._module_state.shape_of(param)
        if kind is None:
            return None
        read = partial(self._module_state.value_of, param)
        return StoredTensor(tuple(kind[0]), kind[1], read), partial(self._module_state.set_value, param)

    @override
    def like(self, param: Tensor) -> Tensor:
        kind = self._module_state.shape_of(param)
        return param if kind is None else torch.empty(kind[0], dtype=kind[1], device="meta")


def _guess(units: Sequence[Unit]) -> list[int]:
    """The assumed order of the first step: forward through the units, then back."""
    forward = [unit.index for unit in units]
    root = [unit.index for unit in units if unit.is_root]
    return forward + root + [index for index in reversed(forward) if index not in root]
