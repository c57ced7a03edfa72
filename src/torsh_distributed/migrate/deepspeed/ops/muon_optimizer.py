"""Muon for matrices, AdamW for everything else: DeepSpeed's optimizer type "Muon"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError

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
    """Groups with `use_muon` are updated by Muon, the others by AdamW. Matrices must be whole, not sharded."""

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        direction = orthogonalized(mixed.flatten(1)).view_as(param)
        stretch = max(1.0, param.shape[0] / direction.flatten(1).shape[1]) ** 0.5
        param.add_(direction, alpha=-group["lr"] * stretch)

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
