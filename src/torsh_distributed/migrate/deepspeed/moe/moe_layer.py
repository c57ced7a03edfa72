"""`deepspeed.moe.layer.MoE`: any module as experts behind a gate, with DeepSpeed's names and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.moe.expert_modules import ExpertModules
from torsh_distributed.migrate.deepspeed.moe.gating import Routing, TopKGate


class MOELayer(nn.Module):
    """A gate and experts; after forward, `l_aux` and `exp_counts` are what the gate said of the tokens."""

    def __init__(self, gate: TopKGate, experts: ExpertModules) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    @override
    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing: Routing = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = routing.balance, routing.counts
        kept = routing.is_kept.flatten().nonzero().squeeze(1)
        token_of_row = kept % max(len(tokens), 1)
        rows = tokens.index_select(0, token_of_row)
        done: Tensor = self.experts(rows, routing.experts.flatten()[kept].unsqueeze(1), rows.new_ones((len(rows), 1)))
        # In fp32 also for experts in 16 bits; a token that no expert has taken is 0.
        weighted = done.float() * routing.weights.flatten()[kept].unsqueeze(1)
        out = weighted.new_zeros((len(tokens), done.shape[1])).index_add(0, token_of_row, weighted)
        return out.to(done.dtype).view(*hidden_states.shape[:-1], done.shape[1])


class MoE(nn.Module):
    """`num_experts` copies of `expert` behind a gate; returns outputs, the balance loss and the tokens of each expert.

    As in DeepSpeed a rank counts its own tokens, so results do not depend on where experts are. With `ep_size` above 1
    an engine spreads them over that many ranks when it is made (see `stacked_modules`).
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
        """`use_tutel` asks for other kernels with the same results: it is not read."""
        super().__init__()
        if enable_expert_tensor_parallelism:
            raise FeatureNotAvailable(
                "MoE(enable_expert_tensor_parallelism=True) is not supported: an expert is whole on its rank",
                hint="use torsh_distributed.MoELayer with mesh.ep and mesh.tp of a plan",
            )
        require(
            num_experts % ep_size == 0,
            f"Number of experts ({num_experts}) should be divisible by expert parallel size ({ep_size})",
        )
        require(
            noisy_gate_policy in (None, "None", "Jitter", "RSample"),
            f"Unsupported noisy_gate_policy: {noisy_gate_policy}",
        )
        self.use_residual = use_residual
        self.num_experts, self.ep_size = num_experts, ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, ExpertModules(expert, num_experts, self.expert_group_name))
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    @property
    def num_local_experts(self) -> int:
        """The experts on this rank: all of them until an engine spreads them."""
        return self.deepspeed_moe.experts.num_local_experts

    @override
    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        whole = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            mix = functional.softmax(self.coefficient(hidden_states), dim=-1)
            whole = whole * mix[..., 0:1] + dense * mix[..., 1:]
        balance, counts = self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        assert balance is not None, "forward sets both"
        assert counts is not None, "forward sets both"
        return whole, balance, counts


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has such layers, and the number of experts in the first."""
    counts = [one.num_experts for one in m.modules() if isinstance(one, MoE)]
    return bool(counts), counts[0] if counts else 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is an expert's, as an MoE marks it; an engine's own copies are marked too."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether an optimizer's group holds parameters of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that all ranks have, and those of experts."""
    given = list(params)
    return [one for one in given if not is_moe_param(one)], [one for one in given if is_moe_param(one)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Groups of an optimizer in which experts have groups of their own, marked with `moe`.

    `max_group_size` is not read: DeepSpeed cuts groups to flatten them, and these are not flattened.
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    shared, apart = [], []
    for group in groups:
        ours, experts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": ours})
        for name in dict.fromkeys(getattr(one, "group_name", "experts") for one in experts):
            found = [one for one in experts if getattr(one, "group_name", "experts") == name]
            apart.append({**group, "name": name, "moe": True, "params": found})
    return [*shared, *apart]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Parameters or groups for an optimizer of a model with experts: groups, with experts in their own."""
    require(isinstance(model_parameters, list), "model_parameters must be a list")
    for one in model_parameters:
        if not isinstance(one, torch.Tensor | dict):
            raise TypeError(
                "param argument that would be given to the optimizer should be an iterable of Tensors or dicts,"
                f" but got {type(one)}"
            )
    if isinstance(model_parameters[0], dict):
        has_groups = any("moe" in group for group in model_parameters)
        return (
            model_parameters if has_groups else split_params_into_different_moe_groups_for_optimizer(model_parameters)
        )
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
