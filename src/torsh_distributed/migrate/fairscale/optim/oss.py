"""FairScale's OSS: an optimizer whose state is spread over ranks, each parameter on one of them (ZeRO-1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.objects import all_gather_object, gather_object
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.parallel.data.replicated_params import batches


class HalfGradScaler(GradScaler):
    """`fairscale.optim.GradScaler`: torch's, for gradients in float16 too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda" if torch.cuda.is_available() else "cpu", *args, **kwargs)

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class ShardedGradScaler(GradScaler):
    """torch's scaler, with one decision for all ranks: a gradient that overflows on one rank skips the step on all.

    Works on the CPU too, where FairScale's turns itself off.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            "cuda" if torch.cuda.is_available() else "cpu",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._group = process_group

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Every rank calls this, also one that holds no gradient; gradients may be float16, as in FairScale."""
        found: dict[Any, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        group = resolve_group(self._group)
        worst = torch.zeros((), device=inv_scale.device)
        for one in found.values():
            worst = torch.maximum(worst, one.to(inv_scale.device).reshape(()))
        all_reduce(worst, op="max", group=group)
        if not found:
            found[inv_scale.device] = found_inf
        for one in found.values():
            one.fill_(worst.to(one.device))
        return found


ParamGroup = dict[str, Any]


class OSS(Optimizer):
    """Wraps an optimizer class; every rank builds one over all parameters and updates those it owns.

    A parameter belongs to one rank: in the order of the groups, the next one goes to the rank with the fewest elements.
    After a step every owner sends its parameters to the others. `optim` is this rank's own optimizer; gradients must be
    averaged already, by ShardedDataParallel or DistributedDataParallel. `broadcast_fp16` sends parameters as float16,
    to which all ranks round them. `broadcast_buffer_size` and `force_broadcast_object` have no effect: messages have
    about 25 MB, and state travels without pickle.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        self.group = resolve_group(group)
        self.world_size = self.group.size()
        self.rank = self.group.rank()
        self.global_rank = dist.get_global_rank(self.group, self.rank)
        self.broadcast_fp16 = broadcast_fp16
        self._owner: dict[Tensor, int] = {}
        self._loads = [0] * self.world_size
        self._collected: list[dict[int, Any]] = []
        super().__init__(params, default)
        self.optim = optim(self.partition_parameters()[self.rank], **default)
        self.defaults = {**self.optim.defaults, **self.defaults}  # schedulers look for momentum there
        _copy_settings(self.optim.param_groups, self.param_groups)

    # --- who owns what ------------------------------------------------------------------------------------------

    @override
    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group and share its parameters out; every rank calls this. Earlier ones stay where they are."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for param in added["params"]:
            rank = self._loads.index(min(self._loads))
            self._owner[param] = rank
            self._loads[rank] += param.numel() if param.requires_grad else 1
        if hasattr(self, "optim"):  # else the constructor adds it
            self.optim.add_param_group(self._owned(added, self.rank))
            _copy_settings(self.optim.param_groups, self.param_groups)

    def partition_parameters(self) -> list[list[ParamGroup]]:
        """By rank, the groups with the parameters that it owns."""
        return [[self._owned(group, rank) for group in self.param_groups] for rank in range(self.world_size)]

    def owner(self, param: Tensor) -> int:
        """The rank in the group that updates a parameter."""
        return self._owner[param]

    def refresh_trainable(self) -> None:
        """Nothing to refresh: which parameters are trained is looked up at every step."""

    def _owned(self, group: ParamGroup, rank: int) -> ParamGroup:
        return {**group, "params": [param for param in group["params"] if self._owner[param] == rank]}

    def _params(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    # --- training -----------------------------------------------------------------------------------------------

    @override
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]  # FairScale passes more
        """Update this rank's parameters and exchange all of them; every rank calls this. `kwargs` go to `optim`."""
        _copy_settings(self.param_groups, self.optim.param_groups)
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure=closure, **kwargs)
        self._send_params()
        _copy_settings(self.optim.param_groups, self.param_groups)
        return loss

    @torch.no_grad()
    def _send_params(self) -> None:
        if self.world_size == 1 and not self.broadcast_fp16:
            return
        trained = [param for param in self._params() if param.requires_grad]
        sent = []
        for rank in range(self.world_size):
            for batch in batches([param for param in trained if self._owner[param] == rank]):
                flat = torch.cat([param.detach().reshape(-1) for param in batch])
                flat = flat.half() if self.broadcast_fp16 else flat
                source = dist.get_global_rank(self.group, rank)
                sent.append((rank, batch, broadcast(flat, source, group=self.group, async_op=True)))
        for rank, batch, work in sent:
            flat = work.wait()
            if rank == self.rank and not self.broadcast_fp16:
                continue  # its own
            for param, values in zip(batch, torch.split(flat, [param.numel() for param in batch]), strict=True):
                param.copy_(values.view_as(param))

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[Tensor]], Iterable[Tensor]] | None = None,
    ) -> Tensor:
        """Scale gradients so their norm over all parameters is at most `max_norm`; returns it. Every rank calls this.

        Each rank counts what it owns. `filter_params_fn` chooses among these, so that what ranks of a split model share
        counts once; the norm is over the world, as in FairScale.
        """
        norm_type = float(norm_type)
        held = [param for param in self._params() if param.grad is not None]
        owned = [param for param in held if self._owner[param] == self.rank]
        counted = owned if filter_params_fn is None else filter_params_fn(owned)
        device = self._params()[0].device
        norms = [torch.linalg.vector_norm(param.grad.detach().float(), norm_type) for param in counted]  # type: ignore[union-attr]  # counted ones have a gradient
        largest = norm_type == math.inf
        if not norms:
            total = torch.zeros((), device=device)
        elif largest:
            total = torch.stack([norm.to(device) for norm in norms]).max()
        else:
            total = torch.stack([norm.to(device) for norm in norms]).pow(norm_type).sum()
        all_reduce(total, op="max" if largest else "sum")
        norm = total if largest else total.pow(1.0 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for param in held:
            assert param.grad is not None, "held parameters are those with a gradient"
            param.grad.mul_(scale.to(param.grad.device))
        return norm

    # --- state --------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gather the state of all ranks on one of the group (-1: on all), for `state_dict`; every rank calls this."""
        _copy_settings(self.param_groups, self.optim.param_groups)
        mine = _on_host(self.optim.state_dict()["state"])
        if recipient_rank == -1:
            self._collected = all_gather_object(mine, group=self.group)
        else:
            recipient = dist.get_global_rank(self.group, recipient_rank)
            self._collected = gather_object(mine, recipient, group=self.group) or []

    @override
    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The whole state as a plain optimizer of this class would save it, as last consolidated.

        Raises RuntimeError on a rank that has none. With `all_ranks` every rank calls this and gets it.
        """
        if all_ranks:
            self.consolidate_state_dict(recipient_rank=-1)
        elif not self._collected:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict()` on all "
                "ranks beforehand if you meant to save the global state"
            )
        index_of = {param: index for index, param in enumerate(self._params())}
        whole: dict[str, Any] = super().state_dict()
        state: dict[int, Any] = {}
        for groups, held in zip(self.partition_parameters(), self._collected, strict=True):
            owned = list(chain.from_iterable(group["params"] for group in groups))
            state.update({index_of[owned[local]]: values for local, values in held.items()})
        return {**whole, "state": {**dict(sorted(state.items())), **_of_no_param(whole["state"])}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, of this class or a plain optimizer, saved at any number of ranks; it is not changed."""
        beside = _of_no_param(state_dict["state"])
        super().load_state_dict({"state": beside, "param_groups": list(state_dict["param_groups"])})
        params = self._params()
        owned = self._owned_in_order()
        local_of = {param: local for local, param in enumerate(owned)}
        # Saved indices count parameters in the order of the saved groups.
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        state = {
            local_of[param]: state_dict["state"][index]
            for index, param in zip(saved, params, strict=True)
            if param in local_of and index in state_dict["state"]
        }
        groups = self.optim.state_dict()["param_groups"]
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        _copy_settings(self.param_groups, self.optim.param_groups)
        self._collected = []

    def _owned_in_order(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.optim.param_groups))


def _copy_settings(source: Sequence[ParamGroup], target: Sequence[ParamGroup]) -> None:
    """Learning rates and all else but the parameters, as schedulers change them."""
    for given, taken in zip(source, target, strict=True):
        taken.update({key: value for key, value in given.items() if key != "params"})


def _of_no_param(state: Mapping[Any, Any]) -> dict[str, Any]:
    """What wrappers such as AdaScale keep in an optimizer's state, under names of their own."""
    return {key: value for key, value in state.items() if isinstance(key, str)}


def _on_host(value: Any) -> Any:
    """State that can be sent: its tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(one) for one in value)
    return value
