"""Initial values of a model on the meta device, drawn a block at a time into what this rank holds of it."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.parallel.models.materialize import Materializer, ParamInit
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.weights.computed_buffers import compute_buffers
from torsh_distributed.parallel.weights.held_parts import HeldParts
from torsh_distributed.parallel.weights.model_weights import ModelWeights, copy_part


class DrawnWeights(ModelWeights):
    """The values that `Materializer` draws: those of a module depend on `seed` and its name, not on who holds it.

    Every rank constructs it, before the model is split. It keeps a copy of the model on meta, whose blocks get values
    one after the other and lose them once this rank has taken its part: no rank holds more than a block beside it.
    Buffers that are no part of the model's state are computed here, as for stored weights.
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
