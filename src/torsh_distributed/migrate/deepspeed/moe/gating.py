"""Which experts a token goes to, by DeepSpeed's rules: the best one, the best two, or the best k.

Random numbers are drawn as DeepSpeed draws them, so the same seed gives the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Gumbel, Uniform
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require

_JITTER = 1e-2


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a rank go. Tensors are (choices, tokens) unless they say otherwise."""

    balance: Tensor
    """A number: small if all experts get equally many tokens."""

    counts: Tensor
    """(experts,): tokens that chose an expert, also those above its capacity."""

    experts: Tensor
    is_kept: Tensor
    """False where an expert is full: the token does not go there."""

    weights: Tensor


class TopKGate(nn.Module):
    """Scores experts by a linear layer, in fp32, and chooses `k` of them for each token.

    An expert takes at most `capacity_factor` times an even share of a rank's tokens, and at least `min_capacity`; with
    `drop_tokens` off it takes all.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """`use_rts`: a full expert drops tokens at random (k = 1). `top2_2nd_expert_sampling`: so is the second chosen.

        `ep_group` is not read: a rank counts its own tokens, and as many as there are travel.
        """
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.num_experts = k, num_experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.drop_tokens = min_capacity, drop_tokens
        self.noisy_gate_policy = noisy_gate_policy
        self.use_rts, self.top2_2nd_expert_sampling = use_rts, top2_2nd_expert_sampling

    @override
    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        """`used_token`: 0 for tokens that go nowhere; DeepSpeed reads it for k = 1 alone, and so does this."""
        inputs = tokens.float()
        if self.training and self.noisy_gate_policy == "Jitter":
            low, high = inputs.new_tensor(1 - _JITTER), inputs.new_tensor(1 + _JITTER)
            inputs = inputs * Uniform(low, high).rsample(inputs.shape)
        logits = functional.linear(inputs, self.wg.weight.float())
        if self.k == 1:
            return self._best_one(logits, used_token)
        return self._best_two(logits) if self.k == 2 else self._best_k(logits)

    def _best_one(self, logits: Tensor, used: Tensor | None) -> Routing:
        gates = functional.softmax(logits, dim=1)
        is_noisy = self.training and self.noisy_gate_policy == "RSample"
        chosen = (logits + _gumbel(logits) if is_noisy else gates).argmax(dim=1)
        mask = functional.one_hot(chosen, self.num_experts)
        if used is not None:
            mask = mask * used.reshape(-1, 1).to(mask.dtype)
        # Drawn even if no expert is full, which depends on the tokens.
        order = mask * torch.rand_like(gates) if self.use_rts else mask.to(gates.dtype)
        require(
            not self.drop_tokens or len(gates) >= self.min_capacity,
            "No. of tokens (batch-size) should be greater than min_capacity."
            " Either set min_capacity to 0 or increase your batch size.",
            num_tokens=len(gates),
            min_capacity=self.min_capacity,
        )
        kept = _largest(order, mask, self._capacity(len(gates))) if self.drop_tokens else mask
        return Routing(
            balance=(gates.mean(dim=0) * mask.float().mean(dim=0)).sum() * self.num_experts,
            counts=mask.sum(dim=0),
            experts=chosen.unsqueeze(0),
            is_kept=kept.any(dim=1).unsqueeze(0),
            weights=(gates * kept).sum(dim=1).unsqueeze(0),
        )

    def _best_two(self, logits: Tensor) -> Routing:
        gates = functional.softmax(logits, dim=1)
        first = gates.argmax(dim=1)
        mask = functional.one_hot(first, self.num_experts)
        scores = logits + _gumbel(logits) if self.top2_2nd_expert_sampling else logits
        second = scores.masked_fill(mask.bool(), -torch.inf).argmax(dim=1)
        other = functional.one_hot(second, self.num_experts)
        # Second choices queue behind all first ones.
        places = mask.cumsum(dim=0) - 1, other.cumsum(dim=0) - 1 + mask.sum(dim=0, keepdim=True)
        capacity = self._capacity(len(gates)) if self.drop_tokens else 2 * len(gates)
        is_kept = torch.stack(
            [(chosen * (place < capacity)).any(dim=1) for chosen, place in zip((mask, other), places, strict=True)]
        )
        experts = torch.stack([first, second])
        return Routing(
            balance=(gates.mean(dim=0) * mask.float().mean(dim=0)).mean() * self.num_experts**2,
            counts=(mask + other).sum(dim=0),
            experts=experts,
            is_kept=is_kept,
            weights=_shares(gates, experts, is_kept),
        )

    def _best_k(self, logits: Tensor) -> Routing:
        gates = functional.softmax(logits, dim=1)
        values, chosen = gates.topk(self.k, dim=1)
        mask = torch.zeros_like(gates, dtype=torch.long).scatter_(1, chosen, 1)
        kept = mask
        if self.drop_tokens:
            # A full expert keeps the tokens that want it most.
            wanted = torch.zeros_like(gates).scatter(1, chosen, values)
            kept = _largest(wanted, mask, self._capacity(len(gates)))
        experts, is_kept = chosen.t(), kept.gather(1, chosen).t().bool()
        return Routing(
            balance=(gates.mean(dim=0) * mask.float().mean(dim=0)).mean() * self.num_experts**2 / self.k,
            counts=mask.sum(dim=0),
            experts=experts,
            is_kept=is_kept,
            weights=_shares(gates, experts, is_kept),
        )

    def _capacity(self, num_tokens: int) -> int:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        # In fp32, where DeepSpeed rounds up.
        even = torch.tensor(factor * (self.k if self.k > 1 else 1)) * (num_tokens / self.num_experts)
        return max(int(torch.ceil(even)), self.min_capacity)


def _gumbel(logits: Tensor) -> Tensor:
    noise: Tensor = Gumbel(logits.new_zeros(()), logits.new_ones(())).rsample(logits.shape)
    return noise


def _largest(order: Tensor, mask: Tensor, capacity: int) -> Tensor:
    """`mask` (tokens, experts) without the tokens that are not among an expert's `capacity` largest in `order`."""
    top = order.topk(min(capacity, len(order)), dim=0).indices
    return mask * torch.zeros_like(mask).scatter_(0, top, 1)


def _shares(gates: Tensor, experts: Tensor, is_kept: Tensor) -> Tensor:
    """(choices, tokens): each kept choice's gate, as a share of the token's kept gates."""
    kept = gates.gather(1, experts.t()).t() * is_kept
    return kept / kept.sum(dim=0).clamp(min=torch.finfo(kept.dtype).eps)
