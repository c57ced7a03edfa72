"""`deepspeed.moe.layer.MoE`: any module as experts, all of them on every rank; tokens go to the best one or two."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require

_log = logging.getLogger(__name__)


class MoE(nn.Module):
    """`num_experts` copies of `expert` behind a gate; returns outputs, the balance loss and the tokens of each expert.

    An expert takes at most `capacity_factor` times an even share of the tokens; the rest pass with output 0, or none do
    with `drop_tokens` off. As in DeepSpeed a rank counts its own tokens, so results do not depend on where experts are:
    with `ep_size` above 1 they are the same, but every rank still has all experts, which is said once.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if enable_expert_tensor_parallelism:
            raise FeatureNotAvailable(
                "MoE(enable_expert_tensor_parallelism=True) is not supported: every rank keeps all experts whole",
                hint="use torsh_distributed.MoELayer with mesh.ep and mesh.tp of a plan",
            )
        require(
            num_experts % ep_size == 0,
            f"Number of experts ({num_experts}) should be divisible by expert parallel size ({ep_size})",
        )
        if ep_size > 1:
            _say_once(ep_size)
        require(k in (1, 2), "Only top-1 and top-2 gatings are supported.", k=k)
        require(
            noisy_gate_policy in (None, "None", "Jitter", "RSample"),
            f"Unsupported noisy_gate_policy: {noisy_gate_policy}",
        )
        self.num_experts, self._k = num_experts, k
        self._factors, self._least = (capacity_factor, eval_capacity_factor), min_capacity
        self._noise, self._drops = noisy_gate_policy, drop_tokens
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_experts))
        self.mlp = copy.deepcopy(expert) if use_residual else None
        self.coefficient = nn.Linear(hidden_size, 2) if use_residual else None

    @override
    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        gates = functional.softmax(self._logits(tokens), dim=1)
        out = torch.zeros_like(tokens)
        counts = torch.zeros(self.num_experts, dtype=torch.long, device=tokens.device)
        total = torch.zeros(len(tokens), device=tokens.device, dtype=gates.dtype)
        placed = []
        for rank, (number, rows) in self._assigned(gates, used_token):
            weight = gates[rows, number]
            total = total.index_add(0, rows, weight)
            placed.append((number, rows, weight))
            if rank == 0:
                counts[number] += len(rows)
        for number, rows, weight in placed:
            # One expert counts with its gate, two with their share of both.
            share = weight if self._k == 1 else weight / total[rows].clamp(min=torch.finfo(gates.dtype).eps)
            result = self.experts[number](tokens[rows])
            result = result[0] if isinstance(result, tuple) else result
            out = out.index_add(0, rows, (result * share.unsqueeze(1).to(result.dtype)).to(out.dtype))
        first = functional.one_hot(gates.argmax(dim=1), self.num_experts).to(gates.dtype)
        balance = (gates.mean(dim=0) * first.mean(dim=0)).sum() * self.num_experts
        whole = out.view_as(hidden_states)
        if self.mlp is not None and self.coefficient is not None:
            dense = self.mlp(hidden_states)
            mix = functional.softmax(self.coefficient(hidden_states), dim=-1)
            dense = dense[0] if isinstance(dense, tuple) else dense
            whole = whole * mix[..., 0:1] + dense * mix[..., 1:]
        return whole, balance, counts

    def _logits(self, tokens: Tensor) -> Tensor:
        inputs = tokens.float()
        if self.training and self._noise == "Jitter":
            inputs = inputs * torch.empty_like(inputs).uniform_(1 - 1e-2, 1 + 1e-2)
        logits = functional.linear(inputs, self.gate.weight.float())
        if self.training and self._noise == "RSample":
            logits = logits - torch.log(-torch.log(torch.rand_like(logits).clamp(min=1e-9, max=1 - 1e-6)))
        return logits

    def _assigned(self, gates: Tensor, used: Tensor | None) -> Iterator[tuple[int, tuple[int, Tensor]]]:
        """For each choice of the tokens: an expert and the tokens it takes, as many as fit, the first first."""
        factor = self._factors[0] if self.training else self._factors[1]
        capacity = max(math.ceil(self._k * factor * len(gates) / self.num_experts), self._least)
        chosen = gates.topk(self._k, dim=1).indices
        taken = [0] * self.num_experts
        for rank in range(self._k):
            for number in range(self.num_experts):
                is_mine = chosen[:, rank] == number
                if used is not None:
                    is_mine = is_mine & used.reshape(-1).bool()
                rows = is_mine.nonzero().squeeze(1)
                rows = rows[: max(0, capacity - taken[number])] if self._drops else rows
                taken[number] += len(rows)
                # An expert without tokens runs on none. As under DeepSpeed all ranks call the same experts: shards are
                # gathered for each call, and gradients are summed by their place among those that a rank has.
                yield rank, (number, rows)


@functools.cache
def _say_once(ep_size: int) -> None:
    if known_variables.whole_number("RANK") in (None, 0):
        _log.warning(
            "MoE(ep_size=%d): results are the same, but every rank keeps all experts in memory; "
            "torsh_distributed.MoELayer with mesh.ep of a plan spreads them",
            ep_size,
        )


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether a model has such layers, and the number of experts in the first."""
    counts = [one.num_experts for one in module.modules() if isinstance(one, MoE)]
    return bool(counts), counts[0] if counts else 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is reduced apart from the others. Ours are not: every rank has all experts."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that are reduced over all ranks, and the others."""
    given = list(params)
    return [one for one in given if not is_moe_param(one)], [one for one in given if is_moe_param(one)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Groups of an optimizer in which experts that are reduced apart have groups of their own, marked with `moe`."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    shared, apart = [], []
    for group in groups:
        ours, experts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": ours})
        for name in dict.fromkeys(getattr(one, "group_name", "experts") for one in experts):
            found = [one for one in experts if getattr(one, "group_name", "experts") == name]
            apart.append({**group, "name": name, "moe": True, "params": found})
    return [*shared, *apart]
