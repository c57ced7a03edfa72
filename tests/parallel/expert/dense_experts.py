"""A mixture of experts written out: every expert computes every token, in one process, with plain torch operations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.plan.sections.expert import ExpertConfig


class Reference:
    """Takes the whole layer's parameters by name (`router.gate.experts.weight`, `experts.up`, …) as leaves."""

    def __init__(self, params: Mapping[str, Tensor], num_experts_per_token: int, *, normalize: bool = False) -> None:
        self.params: dict[str, Tensor] = {
            name: nn.Parameter(value.detach().clone(), requires_grad=True) for name, value in params.items()
        }
        self.k = num_experts_per_token
        self.normalize = normalize
        self.balance_loss = self.z_loss = torch.zeros(())

    def __call__(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """tokens: (tokens, dim). keep: (tokens, choices) factor of each contribution, where some are dropped."""
        params = self.params
        logits = tokens @ params["router.gate.experts.weight"].t()
        probabilities = logits.softmax(dim=1)
        weights, experts = probabilities.topk(self.k, dim=1)
        if self.normalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        if keep is not None:
            weights = weights * keep
        num_experts = logits.shape[1]
        out = torch.zeros(len(tokens), params["experts.down"].shape[2], dtype=tokens.dtype)
        for expert in range(num_experts):
            hidden = functional.gelu(tokens @ params["experts.up"][expert] + params["experts.up_bias"][expert])
            made = hidden @ params["experts.down"][expert] + params["experts.down_bias"][expert]
            out = out + made * (weights * (experts == expert)).sum(dim=1, keepdim=True)
        fraction = torch.stack([(experts == expert).sum() for expert in range(num_experts)]) / experts.numel()
        self.balance_loss = num_experts * (fraction * probabilities.mean(dim=0)).sum()
        self.z_loss = logits.logsumexp(dim=1).square().mean()
        return out


class DenseExperts(nn.Module):
    """`Reference` as a layer of a model, with the weights of `layer`."""

    def __init__(self, layer: nn.Module, config: ExpertConfig) -> None:
        super().__init__()
        self.config = config
        self._reference = Reference(dict(layer.named_parameters()), config.num_experts_per_token)
        self._held = nn.ParameterList(self._reference.params.values())

    @property
    def auxiliary_loss(self) -> Tensor:
        """Of the last forward."""
        balance, z_loss = self._reference.balance_loss, self._reference.z_loss
        return self.config.load_balance_loss_coeff * balance + self.config.router_z_loss_coeff * z_loss

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return self._reference(hidden.flatten(0, 1)).view_as(hidden)


def admitted(
    experts: list[list[int]], *, num_experts: int, capacity: int, reroute: bool
) -> list[list[tuple[int, float]]]:
    """By token and choice: the expert it ends at (-1: none) and what its weight is times, one token after another."""
    load = [0] * num_experts
    ends: list[list[tuple[int, float]]] = [[(-1, 0.0)] * len(choices) for choices in experts]
    refused = []
    for choice in range(len(experts[0]) if experts else 0):
        for token, choices in enumerate(experts):
            expert = choices[choice]
            if load[expert] < capacity:
                load[expert] += 1
                ends[token][choice] = (expert, 1.0)
            else:
                refused.append((token, choice))
    if reroute:
        for token, choice in refused:
            lightest = min(range(num_experts), key=lambda expert: (load[expert], expert))
            if load[lightest] < capacity:
                load[lightest] += 1
                ends[token][choice] = (lightest, 0.5)
    return ends


def capacity(num_tokens: int, k: int, num_experts: int, factor: float) -> int:
    return math.ceil(num_tokens * k / num_experts * factor)
