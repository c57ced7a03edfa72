"""`deepspeed.zero.Init` and `GatheredParameters`: models under construction, and whole parameters in a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.config.hjson_format import read_config
from torsh_distributed.migrate.deepspeed.surface.script_helpers import z3_leaf_module
from torsh_distributed.migrate.deepspeed.training.master_weights import MasterWeights
from torsh_distributed.migrate.deepspeed.zero.param_access import (
    ZeroParamStatus,
    make_sharded,
    make_whole,
    mark,
    mark_whole,
    owner_of,
    trained_param,
)
from torsh_distributed.parallel.state.whole_state import part_of, whole
from torsh_distributed.train.engine import Engine

_ATTRIBUTE = "_external_params"
_NOTED = "_torsh_shards_noted"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say, before `initialize`, that `module` uses a parameter of another one."""
    module.__dict__.setdefault(_ATTRIBUTE, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take it back."""
    known = module.__dict__.get(_ATTRIBUTE, [])
    known[:] = [one for one in known if one is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What a script has registered for a module."""
    registered: list[nn.Parameter] = module.__dict__.get(_ATTRIBUTE, [])
    return registered


def external_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """By module, the modules that have the parameters it uses of others; before the model is sharded."""
    owners = {
        id(param): name
        for name, module in model.named_modules()
        for param in module._parameters.values()
        if param is not None
    }
    return {
        module: list(dict.fromkeys(owners[id(param)] for param in params if id(param) in owners))
        for module in model.modules()
        if (params := _used_by(module))
    }


def _used_by(module: nn.Module) -> list[nn.Parameter]:
    """What a module uses of others: parameters that it registered, and of a leaf module those of all parts of it."""
    return [*external_parameters(module), *(module.parameters() if z3_leaf_module(module) else ())]


def gather_external(model: nn.Module, externals: dict[nn.Module, list[str]]) -> None:
    """From now on these modules find the parameters whole in their forward; after the model is sharded."""
    for module, names in externals.items():
        for name in names:
            piece = _piece_of(model, name)
            if piece is not None:
                module.register_forward_pre_hook(_unshard(piece))
                # Backward shards them again. Without one nobody else does, and values would stay as they are now.
                module.register_forward_hook(_reshard_without_backward(piece))


def _piece_of(model: nn.Module, name: str) -> FSDPModule | None:
    """What is gathered together with a module: the nearest sharded one around it."""
    while True:
        found = model.get_submodule(name)
        if isinstance(found, FSDPModule):
            return found
        if not name:
            return None
        name = name.rpartition(".")[0]


def _unshard(piece: FSDPModule) -> Callable[..., Any]:
    def gather(*_: object) -> None:
        piece.unshard()

    return gather


def _reshard_without_backward(piece: FSDPModule) -> Callable[..., Any]:
    def shard(*_: object) -> None:
        if not torch.is_grad_enabled():
            piece.reshard()

    return shard


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


class Init:
    """Around the construction of a model for stage 3: its tensors have the config's format and DeepSpeed's marks.

    Ranks build the model in host memory, and `initialize` shards it; parameters become those of rank 0. Until then
    every rank has whole values, which scripts may read and change with or without GatheredParameters.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **_: object,
    ) -> None:
        self.enabled = enabled
        given = config_dict_or_path if config_dict_or_path is not None else config
        self._dtype = dtype if dtype is not None else _dtype_of(given)
        self._before = torch.get_default_dtype()
        self._hook: RemovableHandle | None = None
        if module is not None and enabled:
            if self._dtype is not None:
                module.to(self._dtype)
            for param in module.parameters():
                _mark_new(module, "", param)

    def __enter__(self) -> Init:
        self._before = torch.get_default_dtype()
        if self.enabled:
            self._hook = register_module_parameter_registration_hook(_mark_new)
            if self._dtype is not None:
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _mark_new(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None and not hasattr(param, "ds_id"):
        mark(param)


def _dtype_of(config: Any) -> torch.dtype | None:
    """The 16-bit format that a config turns on; None for fp32 or without a config."""
    if config is None:
        return None
    values, _ = read_config(config)
    for section, dtype in _DTYPES.items():
        found = values.get(section)
        if isinstance(found, Mapping) and found.get("enabled") is True:
            return dtype
    return None


class GatheredParameters:
    """In the `with` block these parameters are whole, in their modules and by themselves; every rank enters and leaves.

    With `modifier_rank` the values that this rank leaves in them become everyone's, masters included. Without it,
    changes are lost.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params = _listed(params) if enabled else []
        self._modifier = modifier_rank
        self._whole: list[tuple[nn.Parameter, nn.Parameter, list[tuple[nn.Module, str]]]] = []
        """Each shard, its whole values, and the places where those stand for it."""
        self._planned: list[Any] = []
        """Marked parameters that are not sharded yet, or that one rank holds alone. Any: attributes."""
        self._pieces: list[FSDPModule] = []

    def __enter__(self) -> None:
        self._whole = []
        self._planned = [param for param in self._params if hasattr(param, "ds_id") and not hasattr(param, "to_local")]
        for param in self._planned:
            param.ds_status = ZeroParamStatus.AVAILABLE
        owners = {owner for param in self._params if (owner := owner_of(param)) is not None}
        self._pieces = _sharded_pieces(owners, self._params)
        _note_shards(self._pieces)
        places = _places(owners)
        for param in self._params:
            if hasattr(param, "to_local") and not hasattr(param, "ds_whole"):  # listed once, and by one block
                gathered = nn.Parameter(whole(param.detach()).clone(), requires_grad=param.requires_grad)
                if param.requires_grad:
                    gathered.register_hook(_refuse_gradient)
                found = places.get(id(param), [])
                for module, name in found:
                    module._parameters[name] = gathered
                make_whole(param, gathered)
                if hasattr(param, "ds_id"):
                    mark_whole(gathered, param)
                self._whole.append((param, gathered, found))
            elif (shard := trained_param(param)) is not param:  # whole already, as all are under stage 2
                self._whole.append((shard, param, []))

    @torch.no_grad()
    def __exit__(self, kind: object, *rest: object) -> None:
        for planned in self._planned:
            planned.ds_status = ZeroParamStatus.NOT_AVAILABLE
        for piece in self._pieces:
            piece.reshard()  # a forward in the block may have left it gathered, and FSDP2 would not gather it again
        for param, _, found in self._whole:
            if hasattr(param, "ds_whole"):
                make_sharded(param)
            for module, name in found:
                module._parameters[name] = param
        if kind is not None or self._modifier is None:
            return
        shards = {id(trained_param(param)): trained_param(param) for param in self._params}
        wholes = {id(shard): gathered for shard, gathered, _ in self._whole}
        for shard in shards.values():
            value = wholes.get(id(shard), shard).detach()
            if dist.is_initialized() and dist.get_world_size() > 1:
                broadcast(value, self._modifier)
            if id(shard) in wholes:
                _held(shard).copy_(_held(part_of(value, shard)))
        for owner in {owner for shard in shards.values() if (owner := owner_of(shard)) is not None}:
            if isinstance(owner.optimizer, MasterWeights):
                owner.optimizer.refresh_masters(owner.strategy.state_parts().like)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module to call `generate` on; its layers gather their parameters as they run. Every rank calls this."""
    module: nn.Module = getattr(model, "module", model)
    yield module


def _listed(params: Any) -> list[nn.Parameter]:
    if params is None:
        return []
    if isinstance(params, Tensor):
        return [params]  # type: ignore[list-item]  # parameters are tensors
    return list(params.parameters() if isinstance(params, nn.Module) else params)


def _refuse_gradient(_: Tensor) -> None:
    raise FeatureNotAvailable(
        "a loss was computed from a parameter inside GatheredParameters: its gradient would not reach the shards",
        hint="read the parameter in the forward of its module, or name it with"
        " deepspeed.zero.register_external_parameter in that of another one",
    )


def _sharded_pieces(owners: set[Engine], params: Iterable[nn.Parameter]) -> list[FSDPModule]:
    """What FSDP2 gathers together with these shards."""
    wanted = {id(param) for param in params if hasattr(param, "to_local")}
    found: dict[int, FSDPModule] = {}
    for owner in owners:
        for name, module in owner.unwrapped.named_modules():
            piece = (
                None if wanted.isdisjoint(map(id, module._parameters.values())) else _piece_of(owner.unwrapped, name)
            )
            if piece is not None:
                found[id(piece)] = piece
    return list(found.values())


def _note_shards(pieces: Iterable[FSDPModule]) -> None:
    """Let FSDP2 note its shards, which it does when it first gathers them, before others stand in their place.

    A forward in the block may be the first one, as in PPO, which generates before it trains.
    """
    for piece in pieces:
        if not getattr(piece, _NOTED, False):
            setattr(piece, _NOTED, True)
            piece.unshard()
            piece.reshard()


def _places(owners: set[Engine]) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter of these engines stands: a shared one at several places."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in owners:
        for module in owner.unwrapped.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    found.setdefault(id(param), []).append((module, name))
    return found


def _held(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
