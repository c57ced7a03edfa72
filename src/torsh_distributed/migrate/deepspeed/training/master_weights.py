"""An optimizer over 16-bit parameters that updates fp32 copies of them, the masters.

As in DeepSpeed's fp16 and bf16: the module computes in 16 bits, its gradients are reduced in 16 bits, and what the
optimizer sees is fp32. The masters are sharded as the parameters are. With `on_host` they and the optimizer's state are
in host memory, and so is the update (ZeRO-Offload). With a disk they are in a file there, mapped into memory for the
update (ZeRO-Infinity's optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.training.loss_scales import LossScaler
from torsh_distributed.parallel.offload.storage.tiers import Allocation, DiskTier
from torsh_distributed.parallel.state.held_state import StoredTensor
from torsh_distributed.parallel.torch_internals import _foreach_mul_

MASTER = "master"
"""The key of the fp32 copy in a parameter's state."""


class MasterWeights(Optimizer):
    """Wraps `inner`, an optimizer over 16-bit parameters; their groups are shared, so schedulers reach both.

    Between steps the groups hold the module's parameters, during a step their masters. The state of a parameter is that
    of `inner` with the master beside it.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        on_host: bool = False,
        dtype: torch.dtype = torch.float32,
        disk: DiskTier | None = None,
    ) -> None:
        """`disk`: keeps masters and state; the update is in host memory then."""
        self.optimizer = inner
        self.disk = disk
        self._on_disk: list[Allocation] = []
        self.gradient_factor: float | Tensor = 1.0
        """Multiplies gradients once they are fp32, in the next step: undoes the loss scale and clips."""
        self.loss_scaler: LossScaler | None = None
        """The engine's loss scale, which scripts read here."""
        self._on_host, self._dtype = on_host or disk is not None, dtype
        self._grads: dict[int, Tensor] = {}
        super().__init__(list(inner.param_groups), dict(inner.defaults))
        self.param_groups = inner.param_groups
        inner.register_state_dict_pre_hook(self._give_state)

    def _give_state(self, inner: Optimizer) -> None:
        """Scripts ask for `engine.optimizer.optimizer.state_dict()`: between steps, by the parameters in its groups."""
        params = [param for group in self.param_groups for param in group["params"]]
        inner.state.clear()
        for param in params:
            if param in self.state:
                inner.state[param] = {key: value for key, value in self.state[param].items() if key != MASTER}

    @property
    def loss_scale(self) -> float:
        """The present loss scale."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows change the loss scale."""
        return self.loss_scaler is not None and self.loss_scaler.dynamic

    def make_masters(self, like: Callable[[Tensor], Tensor]) -> None:
        """Give every parameter its master now; `like(param)` is the part of it that this rank updates."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and MASTER not in self.state[param]:
                    self.state[param][MASTER] = self._master_of(like(param))

    @torch.no_grad()
    def refresh_masters(self, like: Callable[[Tensor], Tensor]) -> None:
        """Take the masters from the parameters, which were loaded or changed by hand."""
        for group in self.param_groups:
            for param in group["params"]:
                if MASTER in self.state.get(param, {}):
                    _held(self.state[param][MASTER]).copy_(_held(like(param)))

    @torch.no_grad()
    def refresh_params(self, like: Callable[[Tensor], Tensor]) -> None:
        """Take the parameters from their masters, which were changed by hand."""
        for group in self.param_groups:
            for param in group["params"]:
                if MASTER in self.state.get(param, {}):
                    _held(like(param)).copy_(_held(self.state[param][MASTER]))

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # torch returns the closure's loss
        """Update the masters of all parameters that have a gradient, then the parameters from them."""
        if closure is not None:
            raise InvalidArgument("fp32 masters take no closure: gradients must be computed before the step")
        before = [group["params"] for group in self.param_groups]
        pairs: list[tuple[Tensor, Tensor]] = []
        state: dict[Any, dict[str, Any]] = {}
        grads: list[Tensor] = []
        for group in self.param_groups:
            masters = []
            for param in group["params"]:
                if param.grad is None:
                    continue
                entry = self.state[param]
                if MASTER not in entry:
                    entry[MASTER] = self._master_of(param)
                master = entry[MASTER]
                grads.append(self._give_grad(master, param.grad))
                state[master] = {key: value for key, value in entry.items() if key != MASTER}
                masters.append(master)
                pairs.append((param, master))
            group["params"] = masters
        if not (isinstance(self.gradient_factor, float) and self.gradient_factor == 1.0):
            _foreach_mul_(grads, self.gradient_factor)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
        try:
            self.optimizer.step()
        finally:
            for group, params in zip(self.param_groups, before, strict=True):
                group["params"] = params
        for param, master in pairs:
            for key, value in self.optimizer.state[master].items():
                self.state[param][key] = value if key in self.state[param] else self._kept(value)
            _held(param).copy_(_held(master))
            master.grad = None
        self._forget_grads()
        for allocation in self._on_disk:
            allocation.drop_pages()

    def _kept(self, value: Any) -> Any:
        """State where it is kept from now on: on disk, if there is one and it is more than a number."""
        if self.disk is None or not isinstance(value, Tensor) or not value.dim():
            return value
        local = _held(value.detach())
        place = self.disk.allocate(local.numel() * local.element_size(), "the state of a parameter")
        self._on_disk.append(place)
        stored = place.tensor.view(local.dtype).view(local.shape)
        stored.copy_(local)
        return _in_form_of(value, stored)

    def _master_of(self, param: Tensor) -> nn.Parameter:
        local = _held(param).detach()
        # A copy even if the dtype is the same: the master is not the parameter.
        made = local.to("cpu" if self._on_host else local.device, self._dtype, copy=True)
        return nn.Parameter(self._kept(_in_form_of(param, made)))

    def _give_grad(self, master: Tensor, grad: Tensor) -> Tensor:
        """Set the master's gradient; returns what this rank holds of it. DTensors are slower to make than to refill."""
        values = _held(master)
        local = _held(grad).to(values.device, values.dtype, copy=True)
        if not hasattr(master, "to_local"):
            master.grad = local
            return local
        known = self._grads.get(id(master))
        if known is None:
            known = self._grads[id(master)] = _in_form_of(master, local)
        known._local_tensor = local  # type: ignore[attr-defined]  # a DTensor
        master.grad = known
        return local

    def _forget_grads(self) -> None:
        """Free the fp32 gradients; the DTensors around them stay."""
        for grad in self._grads.values():
            grad._local_tensor = grad._local_tensor.new_empty(0)  # type: ignore[attr-defined]  # a DTensor

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, without its cast of the state to the parameters' dtype."""
        params = [param for group in self.param_groups for param in group["params"]]
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        for index, values in state_dict["state"].items():
            self.put_state(params[index], values)

    def stored_state(self, param: Tensor) -> Mapping[str, StoredTensor]:
        """What a checkpoint keeps of a parameter: its master and the inner optimizer's state."""
        kept = self.state.get(param, {})
        return {
            key: StoredTensor(
                tuple(_held(value).shape),
                value.dtype,
                lambda value=value: _held(value.detach()),  # type: ignore[misc]  # mypy cannot infer the lambda
                is_whole=not _has_form_of(value, kept[MASTER]),
            )
            for key, value in kept.items()
            if isinstance(value, Tensor)
        }

    def put_state(self, param: Tensor, state: Mapping[str, Any] | None) -> None:
        """Store what a checkpoint has of a parameter; without a master, as fp32 training saves, its own stays."""
        if state is None:
            return
        kept = self.state[param]
        for key, value in state.items():
            if key == MASTER and isinstance(kept.get(MASTER), Tensor):
                _held(kept[MASTER]).detach().copy_(_held(value))
            elif isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and self.disk is not None:
                _held(kept[key]).copy_(_held(value))
            elif isinstance(value, Tensor) and self._on_host:
                kept[key] = self._kept(value.to("cpu"))
            else:
                kept[key] = value


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of it. Not by type: importing DTensor takes a second that many jobs need not spend."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _has_form_of(value: Tensor, master: Tensor) -> bool:
    """Whether a value is sharded as the master is; what an optimizer keeps of a whole parameter is not."""
    return value.shape == master.shape and hasattr(value, "device_mesh") == hasattr(master, "device_mesh")


def _in_form_of(like: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's shard of a tensor sharded like `like`."""
    if not hasattr(like, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor), "only DTensors have a mesh"
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move an optimizer's state, masters included, to another memory, in place; scalars stay."""
    for values in optimizer.state.values():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                moved = _in_form_of(value, _held(value.detach()).to(device))
                values[key] = nn.Parameter(moved) if key == MASTER else moved
