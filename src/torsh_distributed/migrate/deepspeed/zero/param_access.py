"""Whole fp32 parameters, gradients and optimizer state of a model that is spread over ranks, one at a time.

DeepSpeed's `safe_get_full_…` and `safe_set_full_…` take a parameter of the module and nothing else, so an engine marks
its parameters with where their state is.

Many scripts save a model parameter by parameter: those with `ds_id` are read inside `GatheredParameters`, from the very
object they hold. So a gathered parameter stays that object, and everything done to it is done to its whole values.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.training.master_weights import MASTER, MasterWeights
from torsh_distributed.parallel.state.whole_state import part_of, whole
from torsh_distributed.train.engine import Engine
from torsh_distributed.train.torch_internals import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ZeroParamStatus(Enum):
    """Where the values of a sharded parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter is kept."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def mark_sharded(param: Any) -> None:
    """Give a sharded parameter what DeepSpeed's have; one that every rank holds whole gets nothing. Any: attributes."""
    if not hasattr(param, "to_local"):
        return
    if not hasattr(param, "ds_id"):
        mark(param)
    shard = param.to_local().detach()
    # A view of what this rank trains. DeepSpeed's shards have equal sizes, with padding; these end where values end.
    param.ds_tensor = shard.reshape(-1)
    param.partition_numel = shard.numel
    param.ds_persist = False


_ids = itertools.count()


def mark(param: Any) -> None:
    """What scripts look at to tell a parameter of stage 3; every rank marks its parameters in the same order."""
    param.ds_id = next(_ids)
    param.ds_shape, param.ds_numel = param.shape, param.numel()
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    param.ds_param_type = ZeroParamType.PARTITIONED
    param.ds_active_sub_modules = set()


def mark_whole(param: Any, shard: Any) -> None:
    """Give whole values that stand for a shard what scripts look at. Any: attributes."""
    for name in ("ds_id", "ds_shape", "ds_numel", "ds_param_type", "ds_active_sub_modules"):
        setattr(param, name, getattr(shard, name))
    param.ds_status = ZeroParamStatus.AVAILABLE


def is_zero_param(parameter: object) -> bool:
    """Whether a parameter is sharded, as DeepSpeed marks it."""
    return hasattr(parameter, "ds_id")


def make_whole(param: Any, gathered: nn.Parameter) -> None:
    """Until `make_sharded`, whatever is done to `param` is done to `gathered`. Any: a DTensor, as its class changes."""
    param.ds_whole = gathered
    param.ds_status = ZeroParamStatus.AVAILABLE
    param.__class__ = _whole_kind()


def make_sharded(param: Any) -> None:
    """The parameter is its shard again."""
    from torch.distributed.tensor import DTensor

    param.__class__ = DTensor
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    del param.ds_whole


_OF_THE_SHARD = (
    *(getattr(Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")),
    *(getattr(Tensor, name).__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    Tensor.register_hook,
)
"""What a gathered parameter still answers for its shard: FSDP2 adds gradients to that one."""


@functools.cache
def _whole_kind() -> type[DTensor]:
    """Made on first use: importing DTensor takes a second that many jobs need not spend."""
    from torch.distributed.tensor import DTensor

    class GatheredParam(DTensor):
        """A sharded parameter whose whole values are at hand."""

        __slots__ = ()

        @classmethod
        @override
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func in _OF_THE_SHARD:
                with DisableTorchFunctionSubclass():
                    return func(*args, **dict(kwargs or {}))
            return func(*_with_whole(args), **_with_whole(dict(kwargs or {})))

        @override
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return copy.deepcopy(self.ds_whole, memo)  # type: ignore[attr-defined]  # set by make_whole

        @override
        def __repr__(self) -> str:  # type: ignore[override]  # torch's takes more
            return repr(self.ds_whole)  # type: ignore[attr-defined]  # set by make_whole

    return GatheredParam


def _with_whole(value: Any) -> Any:
    """The arguments of a call with whole parameters in the place of gathered ones."""
    if isinstance(value, Tensor):
        return getattr(value, "ds_whole", value)
    if isinstance(value, dict):
        return {name: _with_whole(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_whole(one) for one in value)
    return value


_owners = WeakTensorKeyDictionary()
"""Parameter to a weak reference to its Engine."""
_trained = WeakTensorKeyDictionary()
"""Whole parameter of stage 2 to a weak reference to the shard that is trained in its place."""


def give_access(core: Engine, *, marks: bool) -> None:
    """From now on the functions below find the state of this engine's parameters; `marks`: scripts see the shards."""
    for param in core.unwrapped.parameters():
        _owners[param] = weakref.ref(core)
        if marks:
            mark_sharded(param)


def note_whole(param: Tensor, sharded: Tensor) -> None:
    """`param` has the whole values of `sharded`, which is what the optimizer knows."""
    if param is not sharded:
        _trained[param] = weakref.ref(sharded)


def trained_param(param: Tensor) -> Any:
    """What is trained of a parameter: a shard in place of a whole one of stage 2. Any: parameters or tensors."""
    found = _trained.get(param)  # type: ignore[no-untyped-call]  # untyped in torch
    sharded = None if found is None else found()
    return param if sharded is None else sharded


def owner_of(param: Tensor) -> Engine | None:
    """The Engine that trains a parameter."""
    found = _owners.get(param)  # type: ignore[no-untyped-call]  # untyped in torch
    return None if found is None else found()


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole parameter in fp32, from its master if it has one; None if it is frozen. Every rank calls this."""
    param = trained_param(param)
    core = owner_of(param)
    if core is None or not param.requires_grad:
        return None
    return whole(_master(core, param).detach()).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the whole parameter and its master; every rank calls this with the same value."""
    param = trained_param(param)
    core = _owned(param)
    part = core.strategy.state_parts().like(param)
    with torch.no_grad():
        for target in {id(one): one for one in (_master(core, param), part, param)}.values():
            _held(target).copy_(_held(part_of(value.to(target.dtype), target)))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A whole tensor of the optimizer's state, such as `exp_avg`; every rank calls this."""
    param = trained_param(param)
    core = owner_of(param)
    value = None if core is None else core.optimizer.state.get(param, {}).get(optim_state_key)
    return whole(value.detach()).float() if isinstance(value, Tensor) else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set a whole tensor of the optimizer's state; every rank calls this with the same value."""
    param = trained_param(param)
    held = _owned(param).optimizer.state.get(param, {}).get(optim_state_key)
    if not isinstance(held, Tensor):
        raise InvalidArgument(f"the optimizer keeps no {optim_state_key} of this parameter yet")
    with torch.no_grad():
        _held(held).copy_(_held(part_of(value.to(held.dtype), held)))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient between backward and step, in fp32 with the loss scale in it; every rank calls this."""
    param = trained_param(param)
    return None if param.grad is None else whole(param.grad.detach()).float()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the whole gradient before step; every rank calls this with the same value."""
    param = trained_param(param)
    if param.grad is not None:
        _held(param.grad).copy_(_held(part_of(value.to(param.grad.dtype), param.grad)))


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the whole gradient of each parameter by what the function makes of it; every rank calls this."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the parameter, in fp32; None if it is frozen."""
    param = trained_param(param)
    core = owner_of(param)
    return None if core is None or not param.requires_grad else _held(_master(core, param)).detach().float()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the parameter and of its master."""
    param = trained_param(param)
    core = _owned(param)
    with torch.no_grad():
        for target in (_master(core, param), core.strategy.state_parts().like(param)):
            _held(target).copy_(value.view(_held(target).shape))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the gradient, in fp32."""
    param = trained_param(param)
    return None if param.grad is None else _held(param.grad).detach().float()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the gradient."""
    param = trained_param(param)
    if param.grad is not None:
        _held(param.grad).copy_(value.view(_held(param.grad).shape))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of a tensor of the optimizer's state."""
    param = trained_param(param)
    core = owner_of(param)
    value = None if core is None else core.optimizer.state.get(param, {}).get(optim_state_key)
    return _held(value).detach().float() if isinstance(value, Tensor) else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a tensor of the optimizer's state."""
    param = trained_param(param)
    held = _owned(param).optimizer.state.get(param, {}).get(optim_state_key)
    if not isinstance(held, Tensor):
        raise InvalidArgument(f"the optimizer keeps no {optim_state_key} of this parameter yet")
    with torch.no_grad():
        _held(held).copy_(value.view(_held(held).shape))


def _owned(param: nn.Parameter) -> Engine:
    core = owner_of(param)
    if core is None:
        raise InvalidArgument(
            "the parameter belongs to no engine", hint="pass a parameter of engine.module, after deepspeed.initialize"
        )
    return core


def _master(core: Engine, param: Tensor) -> Tensor:
    """What the update works on."""
    if isinstance(core.optimizer, MasterWeights):
        found: Any = core.optimizer.state.get(param, {}).get(MASTER)
        if found is not None:
            master: Tensor = found
            return master
    return param


def _held(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
