"""`deepspeed.ops`: optimizers under DeepSpeed's names, without its C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, Optimizer
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.parallel.optim import CpuAdam
from torsh_distributed.parallel.state.whole_state import part_of, whole


def _refuse_variants(name: str, *, amsgrad: bool, bias_correction: bool = True) -> None:
    if amsgrad:
        raise FeatureNotAvailable(
            f"{name} does not support the AMSGrad variant.", hint="use torch.optim.AdamW(amsgrad=True)"
        )
    if not bias_correction:
        raise FeatureNotAvailable(f"{name} without bias correction is not supported", hint="leave it on")


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a step returns: the loss of its closure, if it has one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class DeepSpeedCPUAdam(CpuAdam):
    """Adam in host memory with our kernel; AdamW unless `adamw_mode` is false. Weight decay is 0 by default.

    May be built over parameters of any dtype: an engine gives it fp32 masters to update.
    """

    optimizer_id = 0

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_variants("DeepSpeedCPUAdam", amsgrad=amsgrad, bias_correction=bias_correction)
        super().__init__(model_params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=adamw_mode)
        self.adam_w_mode = adamw_mode

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        Adam.add_param_group(self, param_group)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with our kernel where it can: fp32 in host memory; else as torch does."""
        held = (param for group in self.param_groups for param in group["params"] if param.grad is not None)
        if all(param.dtype is torch.float32 and param.device.type == "cpu" for param in held):
            return super().step(closure)
        return Adam.step(self, closure)


class FusedAdam(Adam):
    """Adam by torch's own kernels; AdamW unless `adam_w_mode` is false. Weight decay is 0 by default.

    On a GPU, torch's fused kernel; in host memory ours is `DeepSpeedCPUAdam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_variants("FusedAdam", amsgrad=amsgrad, bias_correction=bias_correction)
        super().__init__(params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=adam_w_mode)
        self.adam_w_mode = adam_w_mode

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)


class DeepSpeedCPUAdagrad(Adagrad):
    """torch's Adagrad under DeepSpeed's arguments."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLamb(Optimizer):
    """LAMB with DeepSpeed's clamps of the ratio; parameters may be sharded (DTensors), norms are of the whole."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _refuse_variants("FusedLamb", amsgrad=amsgrad)
        if max_grad_norm:
            raise FeatureNotAvailable("FusedLamb does not clip", hint="use gradient_clipping of the config")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._eps_inside = eps_inside_sqrt

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param)
        return loss

    def _update(self, group: dict[str, Any], param: Any) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(param.grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        count = float(state["step"])
        size = group["lr"]
        if group["bias_correction"]:
            size *= (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        root = (square + group["eps"]).sqrt() if self._eps_inside else square.sqrt() + group["eps"]
        update = mean / root
        if group["weight_decay"]:
            update = update + group["weight_decay"] * param
        weight_norm, update_norm = float(_norm(param)), float(_norm(update))
        ratio = 1.0
        if weight_norm and update_norm:
            ratio = min(max(weight_norm / update_norm, group["min_coeff"]), group["max_coeff"])
        param.add_(update, alpha=-size * ratio)


def _norm(tensor: Any) -> torch.Tensor:
    """The norm of the whole tensor, also of a sharded one."""
    found = tensor.norm()
    whole: torch.Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return whole


class FusedLion(Optimizer):
    """Lion: one moment for each parameter; parameters may be sharded."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                mean = state["exp_avg"]
                direction = (mean * beta1 + param.grad * (1 - beta1)).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                mean.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss


class DeepSpeedCPULion(FusedLion):
    """The same update; the name scripts use with offload."""


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NOT_MATRICES = ("embed", "lm_head")
"""Names of matrices that AdamW updates."""


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrix with equal singular values, by `steps` of a quintic Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = torch.div(x, x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


class MuonWithAuxAdam(Optimizer):
    """Groups with `use_muon` are updated by Muon, the others by AdamW; parameters may be sharded.

    Every rank gathers the direction of a sharded matrix and makes it orthogonal; state stays sharded. With fp32 masters
    between the optimizer and the engine, no owner could be sent whole matrices instead.
    """

    torsh_needs: str
    """Set by the engine, whose shards are all that is split."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        groups = []
        for given in param_groups:
            own = (
                {"lr": 0.02, "momentum": 0.95}
                if given["use_muon"]
                else {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10}
            )
            groups.append({"weight_decay": 0.0, **own, **given})
        super().__init__(groups, {})

    @classmethod
    def from_config(
        cls, params: Sequence[Any], options: Mapping[str, Any], names: Mapping[int, str]
    ) -> MuonWithAuxAdam:
        """Split parameters, or groups of them, by their shape and name; `options` are the config's params."""
        shared = {key: options[key] for key in ("lr", "weight_decay") if key in options}
        known = {"lr", "weight_decay", "momentum", "betas", "eps", "muon_lr", "adam_lr", "ns_method", "adam_w_mode"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigurationError(
                f"optimizer.params.{unknown[0]} is not a param of Muon", hint=f"it has: {sorted(known)}"
            )
        muon = {**shared, **_renamed(options, {"muon_lr": "lr", "momentum": "momentum"})}
        adam = {**shared, **_renamed(options, {"adam_lr": "lr", "betas": "betas", "eps": "eps"})}
        groups = []
        for given in params if isinstance(params[0], Mapping) else [{"params": params}]:
            own = {key: value for key, value in given.items() if key != "params"}
            halves: dict[bool, list[Tensor]] = {True: [], False: []}
            for param in given["params"]:
                name = names.get(id(param), "")
                halves[param.dim() >= 2 and not any(word in name for word in _NOT_MATRICES)].append(param)
            for use_muon, held in halves.items():
                if held:
                    groups.append({**(muon if use_muon else adam), **own, "params": held, "use_muon": use_muon})
        return cls(groups)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            update = self._muon if group["use_muon"] else self._adam
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    update(param, param.grad, self.state[param], group)
        return loss

    @staticmethod
    def _muon(param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(param))
        momentum.lerp_(grad, 1 - group["momentum"])
        mixed = grad.lerp(momentum, group["momentum"])
        direction = orthogonalized(whole(mixed).flatten(1))
        stretch = max(1.0, direction.shape[0] / direction.shape[1]) ** 0.5
        param.add_(part_of(direction.view(param.shape), param), alpha=-group["lr"] * stretch)

    @staticmethod
    def _adam(param: Tensor, grad: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if not state:
            state["step"], state["exp_avg"] = torch.zeros(()), torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
        count = float(state["step"])
        mean, square = state["exp_avg"] / (1 - beta1**count), state["exp_avg_sq"] / (1 - beta2**count)
        param.addcdiv_(mean, square.sqrt() + group["eps"], value=-group["lr"])


def _renamed(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {own: options[given] for given, own in names.items() if given in options}
