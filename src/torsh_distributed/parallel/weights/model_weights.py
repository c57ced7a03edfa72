"""Where the values of a model on the meta device come from: the interface for strategies that split it first."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.models.materialize import Materializer, ParamInit, model_init
from torsh_distributed.parallel.state.whole_state import part_of, plain_name

Rows = list[tuple[int, int]]
"""Start and stop along dim 0 of a whole tensor, of one run after the other."""


class HeldParts:
    """Tensors that a rank holds whole or as shards (DTensors). A model with split layers overrides `runs` and `piece`:
    what they give may be sharded further."""

    def rows(self, name: str, shape: Sequence[int], held: Tensor) -> Rows | None:
        """The rows of a whole tensor that this rank holds; None if that is not rows."""
        runs = self.runs(name, shape)
        return None if runs is None else _shard_of(runs, held)

    def part(self, name: str, whole: Tensor, held: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the form of `held`."""
        return part_of(self.piece(name, whole), held)

    def runs(self, name: str, shape: Sequence[int]) -> Rows | None:
        """The rows of this rank's piece, before it is sharded; None if a piece is not rows."""
        return [(0, shape[0] if shape else 1)]

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece, before it is sharded."""
        return whole


def _shard_of(runs: Rows, held: Tensor) -> Rows | None:
    """The rows of a rank's shard of a piece that consists of these rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

    if not isinstance(held, DTensor):
        return runs
    cuts = [(axis, one) for axis, one in enumerate(held.placements) if not isinstance(one, Replicate)]
    if not cuts:
        return runs
    axis, cut = cuts[0]
    if len(cuts) > 1 or type(cut) is not Shard or cut.dim != 0:
        return None
    num_rows = sum(stop - start for start, stop in runs)
    count = -(-num_rows // held.device_mesh.size(axis))
    first = min(held.device_mesh.get_local_rank(axis) * count, num_rows)
    return _between(runs, first, min(first + count, num_rows))


def _between(runs: Rows, first: int, last: int) -> Rows:
    """The rows from `first` to `last` of those in `runs`, counted through them."""
    found, begin = [], 0
    for start, stop in runs:
        inside = (start + max(first - begin, 0), min(stop, start + last - begin))
        if inside[0] < inside[1]:
            found.append(inside)
        begin += stop - start
    return found


class ModelWeights(ABC):
    """The values of a model's parameters and buffers, for what a rank holds of it once it is split."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, module: nn.Module, names: Collection[str] | None = None) -> None:
        """Give memory, not values, to the tensors of `module` that have none: those in `names`, by default all.

        Shared parameters stay shared, and sharded ones (DTensors) stay the same objects.
        """
        from torch.distributed.tensor import DTensor  # takes a second to import

        made: dict[Tensor, nn.Parameter] = {}
        for path, inner in module.named_modules(remove_duplicate=False):
            for name, param in list(inner._parameters.items()):
                full = plain_name(f"{path}.{name}" if path else name)
                if param is None or not param.is_meta or isinstance(param, DTensor):
                    continue
                if names is not None and full not in names:
                    continue
                if param not in made:
                    made[param] = nn.Parameter(torch.empty_like(param, device=self.device), param.requires_grad)
                    made[param].__dict__.update(param.__dict__)  # how tensor parallelism cut it, for one
                inner._parameters[name] = made[param]
            for name, buffer in list(inner._buffers.items()):
                full = plain_name(f"{path}.{name}" if path else name)
                if buffer is not None and buffer.is_meta and (names is None or full in names):
                    inner._buffers[name] = torch.empty_like(buffer, device=self.device)
        if any(param.is_meta and isinstance(param, DTensor) for param in module.parameters()):
            module._apply(lambda one: torch.empty_like(one, device=self.device) if one.is_meta else one)  # type: ignore[no-untyped-call]  # untyped in torch

    @abstractmethod
    def load(
        self,
        module: nn.Module,
        parts: HeldParts | None = None,
        *,
        names: Collection[str] | None = None,
        memory: MemoryFile | None = None,
    ) -> None:
        """Fill this rank's parts of `module`'s tensors; every rank of the world calls this.

        A rank may have nothing to fill (`names` empty). Tensors in `memory` may be written through its file. If any
        rank fails, every rank raises.
        """


def copy_part(parts: HeldParts, name: str, whole: Tensor, held: Tensor) -> None:
    """Copy this rank's part of a whole tensor into `held`."""
    local_of(held.detach()).copy_(local_of(parts.part(name, whole, held)))


def compute_buffers(model: nn.Module, device: torch.device, *, init_fn: ParamInit | None = None) -> None:
    """Compute the buffers on meta that are not part of the model's state, in place, on `device`.

    By `init_fn(module)`, the model's own `_init_weights(module)` (transformers) or the module's `reset_parameters()`,
    called while the parameters are on meta, where filling them does nothing. InvalidArgument names a module that has
    none of these, or whose initializer leaves a buffer out.
    """
    for module, init in list(_computed_buffers(model, init_fn)):
        _compute(module, init, device)


def _computed_buffers(model: nn.Module, init_fn: ParamInit | None) -> Iterator[tuple[nn.Module, ParamInit]]:
    """Modules on meta with buffers that are not part of the model's state, each with what fills them."""
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for path, module in model.named_modules():
        lacking = [
            name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta and id(buffer) not in kept
        ]
        if not lacking:
            continue
        init = init_fn or model_init(model, path) or _own_init(module)
        if init is None:
            raise InvalidArgument(
                f"{path or 'the model'} ({type(module).__name__}) computes {', '.join(lacking)} when it is built, which"
                " the meta device does not",
                hint="give the module a reset_parameters() that computes it, or pass param_init_fn",
                module=path,
            )
        yield module, init


def _own_init(module: nn.Module) -> ParamInit | None:
    return (lambda one: one.reset_parameters()) if callable(getattr(module, "reset_parameters", None)) else None  # type: ignore[operator]  # just checked


def _compute(module: nn.Module, init: ParamInit, device: torch.device) -> None:
    """Fill a module's buffers; its parameters are still on meta, where filling them does nothing."""
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.full_like(buffer, _unset(buffer.dtype), device=device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        init(module)
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.numel() and _is_unset(buffer):
            raise InvalidArgument(
                f"{type(module).__name__} computes {name} when it is built, and its initializer does not",
                hint="let param_init_fn compute it, or build this module outside the meta device",
            )


def _unset(dtype: torch.dtype) -> float | int | bool:
    """A value that no table is full of; bool has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max


def _is_unset(buffer: Tensor) -> bool:
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().all())
    return buffer.dtype != torch.bool and bool((buffer == _unset(buffer.dtype)).all())


class DrawnWeights(ModelWeights):
    """The values that `Materializer` draws: those of a module depend on `seed` and its name, not on who holds it.

    Every rank constructs it, before the model is split. It keeps a copy of the model on meta, whose blocks get values
    one after the other and lose them once this rank has taken its part: no rank holds more than a block beside it.
    Buffers that are not part of the model's state are computed here, as for stored weights.
    """

    def __init__(self, model: nn.Module, *, init_fn: ParamInit | None, seed: int) -> None:
        super().__init__(process_group.device())
        compute_buffers(model, self.device, init_fn=init_fn)
        source = copy.deepcopy(model)
        self._last_names = _last_names(source)
        self._materializer = Materializer(source, self.device, init_fn=init_fn, seed=seed)

    @override
    @torch.no_grad()
    def load(
        self,
        module: nn.Module,
        parts: HeldParts | None = None,
        *,
        names: Collection[str] | None = None,
        memory: MemoryFile | None = None,
    ) -> None:
        state = {plain_name(name): held for name, held in module.state_dict(keep_vars=True).items()}
        wanted = {name: held for name, held in state.items() if names is None or name in names}
        with fail_together("initialize the model", dist.group.WORLD):
            self._draw(wanted, parts or HeldParts())

    def _draw(self, wanted: dict[str, Tensor], parts: HeldParts) -> None:
        takers: dict[str, list[str]] = {}
        for name in wanted:
            takers.setdefault(self._last_names.get(name, name), []).append(name)
        for unit, members in self._materializer.units().items():
            names = {full for path, module in members.items() for full in _own(path, module)}
            if takers.keys().isdisjoint(names):
                continue
            with self._materializer.drawing(unit):
                for path, module in members.items():
                    for full, value in _own(path, module).items():
                        for taker in takers.get(full, ()):
                            copy_part(parts, taker, value.detach(), wanted[taker])


def _own(path: str, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module itself, by their plain names in the model."""
    named = {**module._parameters, **module._buffers}
    return {plain_name(f"{path}.{name}" if path else name): one for name, one in named.items() if one is not None}


def _last_names(model: nn.Module) -> dict[str, str]:
    """Name of a parameter to the last name of its tensor, which is drawn for each of its modules: the last one wins."""
    named = [(plain_name(name), id(param)) for name, param in model.named_parameters(remove_duplicate=False)]
    last = {param: name for name, param in named}
    return {name: last[param] for name, param in named}
