"""Adam with stored state: updates piece by piece and loads the next piece meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.offload.paging.units import ParamRange
from torsh_distributed.parallel.offload.storage.mover import Mover, finish_future
from torsh_distributed.parallel.offload.storage.tiered_storage import (
    Slot,
    StatePiece,
    StoredArray,
    TieredStorage,
    overlaps,
    read,
    write,
)
from torsh_distributed.parallel.offload.update.targets import UpdateTarget
from torsh_distributed.parallel.optim import AdamPiece, CpuAdam, adam_update
from torsh_distributed.parallel.state.held_state import StoredTensor

_CHUNK = 1 << 20
"""Elements: from about eight cores on, a core's share of a chunk's four fp32 arrays fits its L2 cache."""

Loaded = tuple[Tensor, Tensor, Tensor]
"""Master values, first and second moments of a piece, fp32."""


def require_adam(optimizer: Optimizer) -> None:
    """Raise InvalidArgument unless the optimizer's update is one we implement."""
    if type(optimizer) not in (Adam, AdamW, CpuAdam):
        raise InvalidArgument(
            f"offload supports Adam and AdamW, not {type(optimizer).__name__}",
            hint="use Adam or AdamW of torch.optim, or CpuAdam, or turn offload.optimizer_state off and shard",
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise InvalidArgument("offload does not support amsgrad", hint="set amsgrad=False")


class OffloadedOptimizer(Optimizer):
    """Adam or AdamW with its state in host memory, on disk, or partly on the device.

    It shares its parameter groups with the optimizer it was made from, so that one's scheduler keeps working.
    """

    torsh_needs = "elements"

    def __init__(
        self, optimizer: Optimizer, targets: Sequence[UpdateTarget], *, storage: TieredStorage, mover: Mover
    ) -> None:
        self._targets = targets
        self._storage = storage
        self._mover = mover
        self._steps: dict[int, int] = {id(entry.param): 0 for target in targets for entry in target.param_ranges}
        self._factor: float | None = None
        self._scratch: Tensor | None = None
        self.before_step: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.clear_grads: Callable[[], None] = lambda: None
        self.owner: object = None
        """An object to keep alive as long as the optimizer, such as the owner of the storage."""
        self.update_s = 0.0
        """Seconds spent in updates so far."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = _StateView(self)  # type: ignore[assignment]  # torch keeps a dict; ours reads storage
        self._import(optimizer)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        """Scripts start an optimizer again with `state.clear()`, or with another dict in its place."""
        view = self.__dict__.get("state")
        if name == "state" and isinstance(view, _StateView):
            view.clear()
            view.update(value)
        else:
            super().__setattr__(name, value)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Allowed only during construction: storage for the state is reserved then."""
        if isinstance(getattr(self, "state", None), _StateView):
            raise InvalidArgument(
                "an offloaded optimizer accepts no further parameters",
                hint="add all groups to the optimizer before offloading it",
            )
        super().add_param_group(param_group)

    def multiply_grads(self, factor: float) -> None:
        """Multiply this step's gradients by `factor` when the update reads them, to clip them."""
        self._factor = factor

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's is overloaded
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise InvalidArgument("an offloaded optimizer takes no closure", hint="compute the loss before step()")
        self.before_step()
        started = time.monotonic()
        with torch.no_grad():
            self._update_all()
        self._factor = None
        self.update_s += time.monotonic() - started
        self.after_step()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)
        self.clear_grads()
        self._factor = None

    def _update_all(self) -> None:
        for target in self._targets:
            target.prepare()
            for position, entry in enumerate(target.param_ranges):
                self._steps[id(entry.param)] += target.has_grad(position)
        work = [(target, piece) for target in self._targets for piece in target.pieces if _has_any_grad(target, piece)]
        groups = {id(param): group for group in self.param_groups for param in group["params"]}
        saving: Future[None] | None = None
        loading = self._start_load(*work[0]) if work else None
        for number, (target, piece) in enumerate(work):
            loaded = self._load(piece) if loading is None else finish_future(loading)
            loading = self._start_load(*work[number + 1]) if number + 1 < len(work) else None
            self._update(target, piece, loaded, groups)
            if saving is not None:
                finish_future(saving)
                saving = None
            if piece.is_direct:
                self._save(target, piece, loaded)
            else:
                saving = self._mover.worker.submit(self._save, target, piece, loaded)
        if saving is not None:
            finish_future(saving)

    def _start_load(self, target: UpdateTarget, piece: StatePiece) -> Future[Loaded] | None:
        """Start decoding a piece, if it must be decoded; ask the kernel to read it, if it is on disk."""
        target.prefetch(piece)
        for slot in piece.slots:
            if isinstance(slot, StoredArray):
                slot.allocation.prefetch()
        return None if piece.is_direct else self._mover.worker.submit(self._load, piece)

    def _load(self, piece: StatePiece) -> Loaded:
        master, exp_avg, exp_avg_sq = (read(self._storage, slot) for slot in piece.slots)
        return master, exp_avg, exp_avg_sq

    def _update(self, target: UpdateTarget, piece: StatePiece, loaded: Loaded, groups: Mapping[int, Any]) -> None:
        """Update a piece in chunks that fit the cores' caches, so converting the gradient to fp32 and rounding the
        result for forward cost no extra memory traffic. `groups`: by the id of a parameter."""
        master, *moments = loaded
        grad = target.grad(piece)
        rounded = target.host_copy(piece) if piece.is_direct else None
        is_on_host = master.device.type == "cpu"
        for start, stop, step, group in self._runs(target, piece, groups):
            count = torch.tensor(float(step), device=master.device)
            for low in range(start, stop, _CHUNK if is_on_host else stop - start):
                high = min(low + _CHUNK, stop) if is_on_host else stop
                part = grad[low:high]
                if part.dtype != torch.float32 or part.device != master.device or self._factor is not None:
                    part = self._widened(part, master.device)
                if self._factor is not None:
                    part.mul_(self._factor)
                exp_avg, exp_avg_sq = (values[low:high] for values in moments)
                adam_update(group, [AdamPiece((master[low:high], part, exp_avg, exp_avg_sq), count)])
                if rounded is not None:
                    rounded[low:high].copy_(master[low:high])

    def _widened(self, grad: Tensor, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return grad.to(device, torch.float32, copy=True)
        if self._scratch is None:
            self._scratch = torch.empty(_CHUNK)
        return self._scratch[: grad.numel()].copy_(grad)

    def _runs(
        self, target: UpdateTarget, piece: StatePiece, groups: Mapping[int, Any]
    ) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
        """Ranges of a piece (start, stop, step, group) whose parameters have the same update; often only one."""
        run: tuple[int, int, int, dict[str, Any]] | None = None
        for position, entry in enumerate(target.param_ranges):
            start = max(entry.start, piece.start) - piece.start
            stop = min(entry.stop, piece.stop) - piece.start
            if start >= stop:
                continue
            step, group = self._steps[id(entry.param)], groups[id(entry.param)]
            if run is not None and target.has_grad(position) and step == run[2] and group is run[3]:
                run = (run[0], stop, step, group)
                continue
            if run is not None:
                yield run
            run = (start, stop, step, group) if target.has_grad(position) else None
        if run is not None:
            yield run

    def _save(self, target: UpdateTarget, piece: StatePiece, loaded: Loaded) -> None:
        for slot, values in zip(piece.slots, loaded, strict=True):
            write(self._storage, slot, values)
        master = piece.slots[0]
        # Publish the stored (rounded) values: results must not depend on whether a unit stayed on the device.
        is_rounded = isinstance(master, StoredArray) and not master.form.is_exact
        values = read(self._storage, master) if is_rounded else loaded[0]
        copy = target.host_copy(piece)
        if copy is not None and not piece.is_direct:
            copy.copy_(values)
        target.publish(piece, values)

    @override
    def state_dict(self) -> dict[str, Any]:
        """In the format of torch's Adam, with plain tensors on the host: each can load the other's."""
        state: dict[int, dict[str, Tensor]] = {}
        groups, number = [], 0
        for group in self.param_groups:
            indices = []
            for param in group["params"]:
                if param in self.state:
                    state[number] = self.state[param]
                indices.append(number)
                number += 1
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": indices})
        return {"state": state, "param_groups": groups}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        counts = [len(group["params"]) for group in state_dict["param_groups"]]
        if counts != [len(group["params"]) for group in self.param_groups]:
            raise InvalidArgument(
                "the state belongs to an optimizer with other parameter groups",
                hint="build the same groups as when the state was saved",
                saved=counts,
                here=[len(group["params"]) for group in self.param_groups],
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own = ("params", "decoupled_weight_decay")  # the kind of Adam stays, as in torch's AdamW
            group.update({key: value for key, value in saved.items() if key not in own})
        for number, param in enumerate(params):
            entry = state_dict["state"].get(number)
            self.put_state(param, entry)

    def _import(self, optimizer: Optimizer) -> None:
        """Take over the state of an optimizer that has already trained."""
        for param, state in list(optimizer.state.items()):
            if "exp_avg" in state and id(param) in self._steps:
                self.put_state(param, state)
        optimizer.state.clear()

    def stored_state(self, param: Tensor) -> dict[str, StoredTensor]:
        """Step, moments and, where they are more precise than the parameter, master values, to read later."""
        if not self.has_state(param):
            return {}
        entry, _ = self._find(param)
        step = torch.tensor(float(self._steps[id(param)]))
        found = {"step": StoredTensor((), torch.float32, lambda: step)}
        for name in ("exp_avg", "exp_avg_sq", *(("master",) if entry.param.dtype != torch.float32 else ())):
            found[name] = StoredTensor(tuple(entry.shape), torch.float32, partial(self._read_local, param, name))
        return found

    def _read_local(self, param: Tensor, name: str) -> Tensor:
        """This rank's part of a moment or of the master values, in new memory."""
        entry, slots = self._find(param)
        flat = torch.empty(entry.stop - entry.start)
        for piece, low, high in slots:
            values = read(self._storage, getattr(piece, name))[low - piece.start : high - piece.start]
            flat[low - entry.start : high - entry.start].copy_(values)
        return flat.view(entry.shape)

    def state_of(self, param: Tensor) -> dict[str, Tensor]:
        """Step and moments of an updated parameter, sharded as the parameter is."""
        entry, _ = self._find(param)
        moments = [_spread_as(entry.param, self._read_local(param, name)) for name in ("exp_avg", "exp_avg_sq")]
        return {"step": torch.tensor(float(self._steps[id(param)])), "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def put_state(self, param: Tensor, state: Mapping[str, Any] | None) -> None:
        """Store the step and the moments of a parameter, and its master values if they are given."""
        if id(param) not in self._steps:
            return  # frozen
        entry, slots = self._find(param)
        self._steps[id(param)] = 0 if state is None else int(state["step"])
        has_master = entry.param.dtype != torch.float32
        if has_master and "master" not in (state or {}) and local_of(entry.param).numel() == entry.shape.numel():
            # Saved without master values: they start as the parameter, which was loaded before.
            state = None if state is None else {**state, "master": entry.param}
        has_master = has_master and state is not None and "master" in state
        for name in ("exp_avg", "exp_avg_sq", *(("master",) if has_master else ())):
            flat = torch.zeros(entry.stop - entry.start) if state is None else _flat_state(state[name])
            if flat.numel() != entry.stop - entry.start:
                raise TensorShapeMismatch(
                    f"the saved {name} of {entry.name} has another size",
                    hint="load the state of the same model, sharded the same way",
                    saved_numel=flat.numel(),
                    numel=entry.stop - entry.start,
                )
            for piece, low, high in slots:
                slot: Slot = getattr(piece, name)
                values = read(self._storage, slot)
                values[low - piece.start : high - piece.start] = flat[low - entry.start : high - entry.start]
                write(self._storage, slot, values)

    def has_state(self, param: Tensor) -> bool:
        """Whether the parameter has been updated."""
        return self._steps.get(id(param), 0) > 0

    def trained(self) -> Iterator[Tensor]:
        """The parameters that have been updated, in the order of the groups."""
        for group in self.param_groups:
            yield from (param for param in group["params"] if self.has_state(param))

    def _find(self, param: Tensor) -> tuple[ParamRange, list[tuple[StatePiece, int, int]]]:
        for target in self._targets:
            for entry in target.param_ranges:
                if entry.param is param:
                    return entry, overlaps(target.pieces, entry.start, entry.stop)
        raise InvalidArgument("the optimizer does not hold this parameter", hint="pass a parameter of its groups")


class _StateView(MutableMapping[Tensor, dict[str, Tensor]]):
    """The optimizer's `state` in torch's format, read from storage and written to it on access."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer

    @override
    def __getitem__(self, param: Tensor) -> dict[str, Tensor]:
        if not self._optimizer.has_state(param):
            raise KeyError(param)
        return self._optimizer.state_of(param)

    @override
    def __setitem__(self, param: Tensor, state: dict[str, Tensor]) -> None:
        self._optimizer.put_state(param, state or None)

    @override
    def __delitem__(self, param: Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        self._optimizer.put_state(param, None)

    @override
    def clear(self) -> None:
        for param in [*self]:
            del self[param]

    @override
    def __contains__(self, param: object) -> bool:
        return isinstance(param, Tensor) and self._optimizer.has_state(param)

    @override
    def __iter__(self) -> Iterator[Tensor]:
        return self._optimizer.trained()

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def _spread_as(param: Tensor, local: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local.to(param.device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _has_any_grad(target: UpdateTarget, piece: StatePiece) -> bool:
    return any(
        entry.start < piece.stop and entry.stop > piece.start and target.has_grad(position)
        for position, entry in enumerate(target.param_ranges)
    )


def _flat_state(values: Tensor) -> Tensor:
    return local_of(values).detach().reshape(-1).to("cpu", torch.float32)
