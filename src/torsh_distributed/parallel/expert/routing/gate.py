"""The gate: a probability for each token and expert, in one step or in two (group, then expert)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.plan.sections.expert import ExpertConfig


@dataclass(frozen=True)
class Scores:
    """The gate's output for each token: float32, or float64 if the tokens are."""

    probabilities: Tensor
    """(tokens, experts); rows add up to 1."""

    z_loss: Tensor
    """The size of the logits: the mean over tokens of logsumexp(logits)², summed over the gate's steps."""

    candidates: Tensor | None
    """(tokens, experts) bool: which experts a token may choose; None: all."""


class Gate(nn.Module):
    """A trainable softmax over the experts.

    It computes in float32 even under autocast: routing is a discrete choice that rounding would change.
    """

    def __init__(
        self,
        input_dim: int,
        config: ExpertConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden = nn.ModuleList(
            nn.Linear(input_dim, input_dim, device=device, dtype=dtype) for _ in range(config.gate_layers - 1)
        )
        self.experts = nn.Linear(input_dim, config.num_experts, bias=False, device=device, dtype=dtype)
        if config.gate_groups > 1:
            self.groups = nn.Linear(input_dim, config.gate_groups, bias=False, device=device, dtype=dtype)
        if config.gate_grouping == "learned":
            size = (config.num_experts, config.gate_groups)
            self.membership = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise learned groups: an expert starts mostly in the group of its neighbours."""
        if self.config.gate_grouping == "learned":
            size = self.config.num_experts // self.config.gate_groups
            self.membership.copy_(2.0 * torch.eye(self.config.gate_groups).repeat_interleave(size, dim=0))

    @override
    def forward(self, tokens: Tensor) -> Scores:
        """tokens: (tokens, input_dim)."""
        with torch.autocast(tokens.device.type, enabled=False):
            inputs = self._explored(tokens if tokens.dtype == torch.float64 else tokens.float())
            for layer in self.hidden:
                assert isinstance(layer, nn.Linear)
                inputs = functional.gelu(_linear(layer, inputs))
            logits = _linear(self.experts, inputs)
            if self.config.gate_groups == 1:
                return Scores(logits.softmax(dim=1), _z_loss(logits), None)
            groups = _linear(self.groups, inputs)
            if self.config.gate_grouping == "learned":
                return self._by_learned_groups(groups, logits)
            return self._by_neighbours(groups, logits)

    def _explored(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        if self.config.router_jitter > 0:
            inputs = inputs * torch.empty_like(inputs).uniform_(
                1 - self.config.router_jitter, 1 + self.config.router_jitter
            )
        return functional.dropout(inputs, self.config.gate_dropout)

    def _by_neighbours(self, groups: Tensor, logits: Tensor) -> Scores:
        inside = logits.view(len(logits), self.config.gate_groups, self.config.num_experts // self.config.gate_groups)
        joint = groups.log_softmax(dim=1).unsqueeze(2) + inside.log_softmax(dim=2)
        z_loss = _z_loss(groups) + _z_loss(inside.flatten(0, 1))
        candidates = None
        if self.config.gate_top_groups is not None:
            best = groups.topk(self.config.gate_top_groups, dim=1).indices
            is_best = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, best, True)
            candidates = is_best.repeat_interleave(inside.shape[2], dim=1)
        return Scores(joint.flatten(1).exp(), z_loss, candidates)

    def _by_learned_groups(self, groups: Tensor, logits: Tensor) -> Scores:
        """Experts belong partly to each group: p(expert) = Σ over groups of p(group) · p(expert | group)."""
        belongs = self.membership.to(logits.dtype).log_softmax(dim=1).t()
        inside = (logits.unsqueeze(1) + belongs).log_softmax(dim=2)
        joint = (groups.log_softmax(dim=1).unsqueeze(2) + inside).logsumexp(dim=1)
        return Scores(joint.exp(), _z_loss(groups) + _z_loss(logits), None)


def _linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(inputs.dtype)
    return functional.linear(inputs, layer.weight.to(inputs.dtype), bias)


def _z_loss(logits: Tensor) -> Tensor:
    """The mean over rows; 0 for no rows, where a mean would be NaN."""
    return logits.logsumexp(dim=1).square().sum() / max(logits.shape[0], 1)
