"""Adam whose state lies in the store: updated piece by piece, the next one fetched while this one computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.offload.storage.mover import Mover, finish_future
from torsh_distributed.parallel.offload.storage.pieces import Piece, Slot, read, write
from torsh_distributed.parallel.offload.storage.tiered_storage import Entry, Store
from torsh_distributed.parallel.offload.update.adam import AdamSettings, adam_update, is_decoupled
from torsh_distributed.parallel.offload.update.targets import Span, Target, local_of

_CHUNK = 1 << 20
"""Elements: a core's part of the four fp32 arrays of a chunk fits its second-level cache from about eight cores on."""

Loaded = tuple[Tensor, Tensor, Tensor]
"""Master values, first and second moments of a piece, fp32."""


class OffloadedOptimizer(Optimizer):
    """The update of Adam or AdamW, with its state in host memory, on disk, or in part on the device.

    It shares its parameter groups with the optimizer it was made from, so that a scheduler of that one works on.
    """

    def __init__(self, optimizer: Optimizer, targets: Sequence[Target], *, store: Store, mover: Mover) -> None:
        self._targets = targets
        self._store = store
        self._mover = mover
        self._is_decoupled = is_decoupled(optimizer)
        self._steps: dict[int, int] = {id(span.param): 0 for target in targets for span in target.spans}
        self._divisor: float | None = None
        self._scratch: Tensor | None = None
        self.before_step: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.clear_grads: Callable[[], None] = lambda: None
        self.owner: object = None
        """What holds the store, if nothing else does: it lives as long as the optimizer."""
        self.update_s = 0.0
        """Seconds spent in updates so far."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = _StateView(self)  # type: ignore[assignment]  # torch keeps a dict; ours is read from the store
        self._import(optimizer)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: the state of every parameter has its place from the start."""
        if isinstance(getattr(self, "state", None), _StateView):
            raise InvalidArgument(
                "an offloaded optimizer takes no further parameters",
                hint="give all groups to the optimizer before it is offloaded",
            )
        super().add_param_group(param_group)

    def divide_grads(self, divisor: float) -> None:
        """Divide this step's gradients by `divisor` when the update reads them: for clipping."""
        self._divisor = divisor

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's is overloaded
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise InvalidArgument("an offloaded optimizer takes no closure", hint="compute the loss before step()")
        self.before_step()
        started = time.monotonic()
        with torch.no_grad():
            self._update_all()
        self._divisor = None
        self.update_s += time.monotonic() - started
        self.after_step()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)
        self.clear_grads()
        self._divisor = None

    def _update_all(self) -> None:
        for target in self._targets:
            target.prepare()
            for position, span in enumerate(target.spans):
                self._steps[id(span.param)] += target.has_grad(position)
        work = [(target, piece) for target in self._targets for piece in target.pieces if _has_any_grad(target, piece)]
        settings = {
            id(param): AdamSettings.of(group, is_decoupled=self._is_decoupled)
            for group in self.param_groups
            for param in group["params"]
        }
        saving: Future[None] | None = None
        loading = self._start_load(work[0][1]) if work else None
        for number, (target, piece) in enumerate(work):
            loaded = self._load(piece) if loading is None else finish_future(loading)
            following = work[number + 1][1] if number + 1 < len(work) else None
            loading = self._start_load(following) if following is not None else None
            self._update(target, piece, loaded, settings)
            if saving is not None:
                finish_future(saving)
                saving = None
            if piece.is_direct:
                self._save(target, piece, loaded)
            else:
                saving = self._mover.worker.submit(self._save, target, piece, loaded)
        if saving is not None:
            finish_future(saving)

    def _start_load(self, piece: Piece) -> Future[Loaded] | None:
        """Begin to fetch a piece that must be decoded; ask the disk for one that must be read."""
        for slot in piece.slots:
            if isinstance(slot, Entry):
                slot.region.warm()
        return None if piece.is_direct else self._mover.worker.submit(self._load, piece)

    def _load(self, piece: Piece) -> Loaded:
        master, exp_avg, exp_avg_sq = (read(self._store, slot) for slot in piece.slots)
        return master, exp_avg, exp_avg_sq

    def _update(self, target: Target, piece: Piece, loaded: Loaded, settings: Mapping[int, AdamSettings]) -> None:
        """Update a piece in chunks that the cores' caches hold: widening the gradient and rounding the result for
        forward cost no traffic to memory of their own."""
        master, exp_avg, exp_avg_sq = loaded
        grad = target.grad(piece)
        rounded = target.host_copy(piece) if piece.is_direct else None
        is_on_host = master.device.type == "cpu"
        divisor = None if self._divisor is None else torch.full((1,), self._divisor, device=master.device)
        for start, stop, step, chosen in self._runs(target, piece, settings):
            count = torch.tensor(float(step), device=master.device)
            for low in range(start, stop, _CHUNK if is_on_host else stop - start):
                high = min(low + _CHUNK, stop) if is_on_host else stop
                part = grad[low:high]
                if part.dtype != torch.float32 or part.device != master.device or divisor is not None:
                    part = self._widened(part, master.device)  # a copy: the kernel writes the divided gradient back
                adam_update(
                    master[low:high],
                    part,
                    exp_avg[low:high],
                    exp_avg_sq[low:high],
                    step=count,
                    settings=chosen,
                    grad_divisor=divisor,
                )
                if rounded is not None:
                    rounded[low:high].copy_(master[low:high])

    def _widened(self, grad: Tensor, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return grad.to(device, torch.float32, copy=True)
        if self._scratch is None:
            self._scratch = torch.empty(_CHUNK)
        return self._scratch[: grad.numel()].copy_(grad)

    def _runs(
        self, target: Target, piece: Piece, settings: Mapping[int, AdamSettings]
    ) -> Iterator[tuple[int, int, int, AdamSettings]]:
        """Runs of a piece (start, stop, step, settings) whose parameters are updated alike; often one."""
        run: tuple[int, int, int, AdamSettings] | None = None
        for position, span in enumerate(target.spans):
            start, stop = max(span.start, piece.start) - piece.start, min(span.stop, piece.stop) - piece.start
            if start >= stop:
                continue
            how = (self._steps[id(span.param)], settings[id(span.param)]) if target.has_grad(position) else None
            if run is not None and how == run[2:]:
                run = (run[0], stop, *run[2:])
                continue
            if run is not None:
                yield run
            run = None if how is None else (start, stop, *how)
        if run is not None:
            yield run

    def _save(self, target: Target, piece: Piece, loaded: Loaded) -> None:
        for slot, values in zip(piece.slots, loaded, strict=True):
            write(self._store, slot, values)
        master = piece.slots[0]
        # What is published is what is held: a small form must not depend on whether a unit stayed on the device.
        is_rounded = isinstance(master, Entry) and not master.form.is_exact
        values = read(self._store, master) if is_rounded else loaded[0]
        copy = target.host_copy(piece)
        if copy is not None and not piece.is_direct:
            copy.copy_(values)
        target.publish(piece, values)

    @override
    def state_dict(self) -> dict[str, Any]:
        """As torch's Adam would give it, with plain tensors on the host: it loads into torch's Adam and back."""
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
                "the state is of an optimizer with other parameter groups",
                hint="build the same groups as when it was saved",
                saved=counts,
                here=[len(group["params"]) for group in self.param_groups],
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, param in enumerate(params):
            entry = state_dict["state"].get(number)
            if id(param) in self._steps:
                self._put_state(param, entry)

    def _import(self, optimizer: Optimizer) -> None:
        """Take over the state of an optimizer that has trained already."""
        for param, state in list(optimizer.state.items()):
            if "exp_avg" in state and id(param) in self._steps:
                self._put_state(param, state)
        optimizer.state.clear()

    def state_of(self, param: Tensor) -> dict[str, Tensor]:
        """Step and moments of a parameter that has been updated, spread over ranks as the parameter is."""
        span, slots = self._find(param)
        moments = []
        for name in ("exp_avg", "exp_avg_sq"):
            flat = torch.empty(span.stop - span.start)
            for piece, low, high in slots:
                slot: Slot = getattr(piece, name)
                values = read(self._store, slot)[low - piece.start : high - piece.start]
                flat[low - span.start : high - span.start].copy_(values)
            moments.append(_spread_as(span.param, flat.view(span.shape)))
        return {"step": torch.tensor(float(self._steps[id(param)])), "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def _put_state(self, param: Tensor, state: Mapping[str, Any] | None) -> None:
        span, slots = self._find(param)
        self._steps[id(param)] = 0 if state is None else int(state["step"])
        for name in ("exp_avg", "exp_avg_sq"):
            flat = torch.zeros(span.stop - span.start) if state is None else _flat_state(state[name])
            if flat.numel() != span.stop - span.start:
                raise TensorShapeMismatch(
                    f"the saved {name} of {span.name} has another size",
                    hint="load the state of the same model, sharded the same way",
                    saved_numel=flat.numel(),
                    numel=span.stop - span.start,
                )
            for piece, low, high in slots:
                slot: Slot = getattr(piece, name)
                values = read(self._store, slot)
                values[low - piece.start : high - piece.start] = flat[low - span.start : high - span.start]
                write(self._store, slot, values)

    def has_state(self, param: Tensor) -> bool:
        """Whether the parameter has been updated."""
        return self._steps.get(id(param), 0) > 0

    def trained(self) -> Iterator[Tensor]:
        """The parameters that have been updated, in the order of the groups."""
        for group in self.param_groups:
            yield from (param for param in group["params"] if self.has_state(param))

    def _find(self, param: Tensor) -> tuple[Span, list[tuple[Piece, int, int]]]:
        for target in self._targets:
            for span in target.spans:
                if span.param is param:
                    bounds = ((p, max(p.start, span.start), min(p.stop, span.stop)) for p in target.pieces)
                    return span, [(piece, low, high) for piece, low, high in bounds if low < high]
        raise InvalidArgument("the optimizer does not hold this parameter", hint="pass one of its own")


class _StateView(Mapping[Tensor, dict[str, Tensor]]):
    """The optimizer's `state` as torch's optimizers have it, read from the store when it is asked for."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer

    @override
    def __getitem__(self, param: Tensor) -> dict[str, Tensor]:
        if not self._optimizer.has_state(param):
            raise KeyError(param)
        return self._optimizer.state_of(param)

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


def _has_any_grad(target: Target, piece: Piece) -> bool:
    return any(
        span.start < piece.stop and span.stop > piece.start and target.has_grad(position)
        for position, span in enumerate(target.spans)
    )


def _flat_state(values: Tensor) -> Tensor:
    return local_of(values).detach().reshape(-1).to("cpu", torch.float32)
