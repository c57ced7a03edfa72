"""FairScale's FullyShardedDataParallel with its own arguments and methods, on torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.migrate.fairscale.nn.fsdp_arguments import FairscaleFsdpArguments
from torsh_distributed.migrate.fairscale.nn.shard_state import (
    joined,
    optimizer_part,
    whole_optimizer_state,
    write_part,
)
from torsh_distributed.parallel.data.replicated_params import broadcast_from_first
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.mesh.mesh_reduction import clip_to_norm, grad_norm, held_by_placement
from torsh_distributed.parallel.models.same_model import check_same_model
from torsh_distributed.parallel.state.whole_state import part_of, whole
from torsh_distributed.parallel.strategy import check_one_device
from torsh_distributed.parallel.torch_internals import tree_map_only

_INNER = "_fsdp_wrapped_module"


class _WholeModule:
    """What is asked of FSDP2, for a module of one rank alone: it has nothing to gather and nothing to send."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...

    def set_gradient_divide_factor(self, factor: float) -> None: ...

    def reshard(self) -> None: ...


def _is_alone(group: Any) -> bool:
    """Whether a script gave an object of its own as a group of one rank, as FairScale's own tests of wrapping do."""
    return not isinstance(group, dist.ProcessGroup) and hasattr(group, "size") and group.size() == 1


def _shard(module: nn.Module, group: dist.ProcessGroup, given: FairscaleFsdpArguments) -> None:
    device = check_one_device(module)
    outer = [param for *_, param in _places(module)]
    check_same_model(module, group)
    with torch.no_grad():
        broadcast_from_first([*outer, *module.buffers()], group)
    compute = given.compute_device if given.compute_device is not None and given.keeps_params_on_cpu else device
    kind = torch.device(compute).type
    fully_shard(
        module,
        mesh=DeviceMesh.from_group(group, kind),
        reshard_after_forward=given.reshards,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=given.param_dtype, reduce_dtype=given.reduce_dtype, cast_forward_inputs=True
        ),
        # On a CPU parameters are in host memory already.
        offload_policy=CPUOffloadPolicy() if given.keeps_params_on_cpu and kind != "cpu" else OffloadPolicy(),
    )


class FairscaleFsdp(nn.Module):
    """A module whose parameters are sharded over the ranks of a group; wrappers may be inside one another.

    Known to scripts as FullyShardedDataParallel. Every rank builds it with the same module, in the same order. The
    parameters become DTensors, one for each of the module's, not one flat one, so build the optimizer afterwards; names
    in state dicts are those of the module without wrappers. Parameters become those of the group's first rank.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None, **arguments: Any) -> None:
        super().__init__()
        self.arguments = given = FairscaleFsdpArguments.from_keywords(arguments)
        self.process_group = process_group if _is_alone(process_group) else resolve_group(process_group)
        assert self.process_group is not None, "given, or the world"
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        if given.compute_device is not None and not given.keeps_params_on_cpu:
            module = module.to(given.compute_device)
        if not _is_alone(self.process_group):
            _shard(module, self.process_group, given)
        elif given.param_dtype is not None or given.keeps_params_on_cpu:
            raise FeatureNotAvailable(
                "without a process group of torch's, FullyShardedDataParallel neither casts nor moves parameters",
                hint="call td.init(), or leave out mixed_precision, compute_dtype and move_params_to_cpu",
            )
        _cast_buffers(module, given.buffer_dtype)
        self.add_module(_INNER, module)
        self._keeps_shards = False
        self._register_state_dict_hook(_leave_wrapper_out)  # type: ignore[no-untyped-call]  # untyped in torch
        self.register_load_state_dict_pre_hook(_put_wrapper_in)  # type: ignore[no-untyped-call]  # untyped in torch

    # --- the module ---------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.get_submodule(_INNER)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.arguments.force_input_to_fp32:
            args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        return self.module(*args, **kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        """Attributes of the module, too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER:
                raise
            return getattr(super().__getattr__(_INNER), name)

    def __getitem__(self, key: int) -> Any:
        """A part of a wrapped nn.Sequential or list."""
        return self.module[key]  # type: ignore[index]  # if it has parts

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names without wrappers."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield plain(name), param

    @override
    def apply(self, fn: Callable[[nn.Module], None]) -> FairscaleFsdp:
        """Call `fn` on every module while its parameters are whole; every rank calls this with the same `fn`."""
        with self.summon_full_params():
            return super().apply(fn)

    # --- gradients ----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of all passes but the last: gradients add up on each rank and are not sent."""
        self._root().set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root().set_requires_gradient_sync(True)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so their norm over the whole model is at most `max_norm`; returns it. Every rank calls."""
        params = [param for param in self.parameters() if param.grad is not None]
        if norm_type == 2.0:
            grads = [param.grad for param in params if param.grad is not None]
            norm = grad_norm(held_by_placement(grads), params[0].device if params else torch.device("cpu"))
            clip_to_norm(grads, norm, max_norm)
            return norm
        return whole(nn.utils.clip_grad_norm_(params, max_norm, norm_type))

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide summed gradients by `pre` × `post` instead of by the number of ranks."""
        inner = fsdp_instances(self) if recursive else [self]
        for one in inner:
            one._root().set_gradient_divide_factor(pre * post)

    def _root(self) -> FSDPModule | _WholeModule:
        module = self.module
        return module if isinstance(module, FSDPModule) else _WholeModule()

    # --- parameters ---------------------------------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Inside, parameters are whole; changes are kept unless `volatile`. Every rank enters and leaves it."""
        with ExitStack() as stack:
            for one in fsdp_instances(self) if recurse else [self]:
                stack.enter_context(one._whole_params(keeps_changes=not volatile))
            yield

    @contextmanager
    def _whole_params(self, *, keeps_changes: bool) -> Iterator[None]:
        self._root().reshard()
        held: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        made: dict[nn.Parameter, nn.Parameter] = {}
        for owner, name, param in _places(self.module):
            if isinstance(param, DTensor):
                if param not in made:
                    gathered: Tensor = param.full_tensor().detach()
                    made[param] = nn.Parameter(gathered, requires_grad=param.requires_grad)
                held.append((owner, name, param, made[param]))
        for owner, name, _, full in held:
            owner.register_parameter(name, full)
        try:
            yield
        finally:
            for owner, name, param, full in held:
                owner._parameters[name] = param
                if keeps_changes:
                    write_part(full.detach(), param)

    # --- state --------------------------------------------------------------------------------------------------

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # of any dict
        """Whole tensors by plain name; every rank calls this."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        given = self.arguments
        if given.state_dict_on_rank_0_only and self.rank != 0 and not self._keeps_shards:
            state.clear()
        if given.state_dict_device is not None:
            for name, value in state.items():
                state[name] = value.to(given.state_dict_device) if isinstance(value, Tensor) else value
        return state

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's shards by plain name."""
        with self._as_shards():
            state = super().state_dict(*args, **kwargs)
        return {name: local_of(value) for name, value in state.items()}

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load this rank's shards, from `local_state_dict` at the same number of ranks."""
        with self._as_shards():
            own = super().state_dict()
        like = {name: value for name, value in own.items() if isinstance(value, DTensor)}
        shards = {
            name: DTensor.from_local(
                value, like[name].device_mesh, like[name].placements, shape=like[name].shape, stride=like[name].stride()
            )
            if name in like
            else value
            for name, value in state_dict.items()
        }
        return super().load_state_dict(shards, strict=strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What `consolidate_shard_weights` needs to know of the shards: the whole shape of each."""
        with self._as_shards():
            own = super().state_dict()
        return {name: tuple(value.shape) for name, value in own.items() if isinstance(value, DTensor)}

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Tensor]], shard_metadata: Sequence[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """The whole state from the `local_state_dict` and `local_metadata_dict` of all ranks, without any of them."""
        return joined(shard_weights, shard_metadata)

    def gather_full_optim_state_dict(self, optim: Optimizer, recipient_rank: int | None = 0) -> dict[str, Any] | None:
        """The optimizer's state with whole tensors, on one rank or (None) on all; every rank calls this."""
        full = whole_optimizer_state(optim)
        return full if recipient_rank in (None, self.rank) else None

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole state, for `optimizer.load_state_dict`; equal on all ranks.

        Its parameters are numbered in the order of `parameters()`.
        """
        return optimizer_part(full_optim_state_dict, list(self.parameters()))

    @contextmanager
    def _as_shards(self) -> Iterator[None]:
        instances = fsdp_instances(self)
        for one in instances:
            one._root().reshard()
            one._keeps_shards = True
        try:
            yield
        finally:
            for one in instances:
                one._keeps_shards = False


def fsdp_instances(module: nn.Module, skip_empty: bool = False) -> list[FairscaleFsdp]:
    """Every wrapper inside a module, itself included; with `skip_empty` those with parameters of their own."""
    found = [one for one in module.modules() if isinstance(one, FairscaleFsdp)]
    return [one for one in found if not skip_empty or any(True for _ in _places(one.module))]


def plain(name: str) -> str:
    """A name without wrappers."""
    return name.replace(f"{_INNER}.", "")


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Where the parameters of a module stand that no wrapper holds, inside it or itself one: module and name there."""
    if isinstance(module, FairscaleFsdp):
        return
    for name, param in module._parameters.items():
        if param is not None:
            yield module, name, param
    for child in module.children():
        yield from _places(child)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    for name, buffer in list(module.named_buffers()):
        if dtype is not None and buffer.is_floating_point():
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner)._buffers[last] = buffer.to(dtype)


def _leave_wrapper_out(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """After `state_dict`: whole tensors under names without the wrapper."""
    assert isinstance(module, FairscaleFsdp), "registered on wrappers only"
    for name in [name for name in state if name.startswith(f"{prefix}{_INNER}.")]:
        value = state.pop(name)
        is_gathered = isinstance(value, DTensor) and not module._keeps_shards
        state[prefix + name.removeprefix(f"{prefix}{_INNER}.")] = whole(value) if is_gathered else value


def _put_wrapper_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before `load_state_dict`: this rank's parts under the names with the wrapper."""
    assert isinstance(module, FairscaleFsdp), "registered on wrappers only"
    module._root().reshard()
    own = dict(_named_outside(module.module))
    for name in [name for name in state if name.startswith(prefix)]:
        value, plain_name = state.pop(name), name.removeprefix(prefix)
        like = own.get(plain_name)
        if isinstance(like, DTensor) and isinstance(value, Tensor):
            if tuple(value.shape) != tuple(like.shape):
                raise InvalidArgument(
                    f"{name} has another shape in the saved state",
                    hint="load a state of the same model; shards load by load_local_state_dict",
                    saved=tuple(value.shape),
                    model=tuple(like.shape),
                )
            value = part_of(value, like)
        state[f"{prefix}{_INNER}.{plain_name}"] = value


def _named_outside(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that no wrapper inside holds, by their names in the module."""
    for name, param in module._parameters.items():
        if param is not None:
            yield f"{prefix}{name}", param
    for name, child in module.named_children():
        if not isinstance(child, FairscaleFsdp):
            yield from _named_outside(child, f"{prefix}{name}.")
