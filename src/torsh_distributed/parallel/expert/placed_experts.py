"""Experts of models that are not ours, such as those of transformers, spread over ranks without rewriting the model.

Their module holds parameters with an entry for each expert and is called with `(hidden, top_k_index, top_k_weights)`.
The router stays as it is, with its losses; tokens travel to the ranks of their experts, where the module's own forward
computes them, and come back.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.compiling import outside_graphs
from torsh_distributed.parallel.expert.balancing.placement import Placement
from torsh_distributed.parallel.expert.dispatch import ExchangeSizes, RowLayout, collect, dispatch
from torsh_distributed.parallel.expert.experts import Experts
from torsh_distributed.parallel.models.structure import expert_modules

_HANDLE = "_torsh_placed"


class PlacedExperts:
    """Where the experts of one module are; made by `placed_experts`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_experts = next(param.shape[0] for param in module.parameters(recurse=False) if param.dim() == 3)
        self.group: dist.ProcessGroup | None = None
        """The ranks that experts are spread over; None while all are here."""
        self.placement = Placement.contiguous(self.num_experts, 1)

    @property
    def ep_rank(self) -> int:
        """This rank's rank in the group that experts are spread over."""
        return 0 if self.group is None else self.group.rank()

    def stacked(self) -> dict[str, nn.Parameter]:
        """The parameters with one entry for each expert here."""
        here = self.placement.per_rank
        return {
            name: param
            for name, param in self.module.named_parameters(recurse=False)
            if param.dim() > 1 and param.shape[0] == here
        }

    def spread(self, group: dist.ProcessGroup) -> None:
        """Keep only this rank's experts; every rank of `group` calls this, with equal experts.

        Parameters stay the same objects, with fewer entries. Nothing happens in a group of one.
        """
        if group.size() == 1:
            return
        stacks = self.stacked()
        self.placement = Placement.contiguous(self.num_experts, group.size())
        self.group = group
        for param in stacks.values():
            param.data = param.data[list(self.placement.experts_of(self.ep_rank))].clone()
            param.grad = None
        if hasattr(self.module, "num_experts"):
            setattr(self.module, "num_experts", self.placement.per_rank)  # noqa: B010 (typed for tensors and modules only)
        own = type(self.module)
        self.module.__class__ = type(f"Placed{own.__name__}", (_SpreadForward, own), {})

    def check(self, name: str, ep: int) -> None:
        """Refuse experts that cannot be spread over `ep` ranks; ConfigurationError says why."""
        if self.num_experts % ep:
            fitting = [degree for degree in range(1, self.num_experts + 1) if self.num_experts % degree == 0]
            raise ConfigurationError(
                f"{name}: {self.num_experts} experts do not spread evenly over mesh.ep {ep}",
                hint=f"take mesh.ep from {', '.join(map(str, fitting))}",
                num_experts=self.num_experts,
                ep=ep,
            )
        taken = inspect.signature(self.module.forward).parameters.values()
        arguments = [one for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD]
        if 3 not in (len(arguments), len([one for one in arguments if one.default is one.empty])):
            raise ConfigurationError(
                f"{name}: the experts are not called with (hidden, top_k_index, top_k_weights), so mesh.ep {ep} cannot"
                " send tokens to them",
                hint="set mesh.ep = 1; mesh.tp or mesh.shard can split these experts",
                arguments=[one.name for one in arguments],
            )


def placed_experts(model: nn.Module) -> dict[str, PlacedExperts]:
    """The modules of experts that are not ours, by name; each has one handle, however often this is called."""
    unknown = set(expert_modules(model))
    found: dict[str, PlacedExperts] = {}
    for name, module in model.named_modules():
        # A module that was placed may have one expert left, which no longer looks like a stack.
        if _HANDLE not in module.__dict__:
            is_stacked = any(param.dim() == 3 for param in module.parameters(recurse=False))
            if name not in unknown or isinstance(module, Experts) or not is_stacked:
                continue
            module.__dict__[_HANDLE] = PlacedExperts(module)
        found[name] = module.__dict__[_HANDLE]
    return found


class _SpreadForward(nn.Module):
    """Extends a module of experts: tokens go to the ranks of their experts, results come back."""

    @override
    @outside_graphs
    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, width): every token's weighted sum. Every rank of the group calls this, also in backward."""
        handle: PlacedExperts = self.__dict__[_HANDLE]
        assert handle.group is not None, "spread sets it"
        tokens = hidden.reshape(-1, hidden.shape[-1])
        index, weights = _by_choice(top_k_index, top_k_weights, len(tokens), handle.num_experts)
        layout = RowLayout.of(index.flatten().argsort(stable=True), num_choices=len(index), num_tokens=len(tokens))
        counts = torch.bincount(index.flatten(), minlength=handle.num_experts)
        leaving = counts.view(handle.group.size(), handle.placement.per_rank)
        arriving = all_to_all_single(leaving, group=handle.group)
        sizes = ExchangeSizes(leaving.sum(dim=1).tolist(), arriving.sum(dim=1).tolist(), handle.group)
        rows = dispatch(tokens, layout, sizes)
        experts = torch.arange(handle.placement.per_rank, device=rows.device).repeat(handle.group.size())
        done = self._computed(rows, experts.repeat_interleave(arriving.flatten().to(rows.device)))
        return collect(done.to(tokens.dtype), weights.to(tokens.dtype), layout, sizes).view_as(hidden)

    def _computed(self, rows: Tensor, experts: Tensor) -> Tensor:
        """The own forward on rows that have one expert each, with weight 1."""
        if not len(rows):  # no token came here, but parameters need a gradient on every rank
            row = rows.sum(dim=0, keepdim=True)
            out: Tensor = super().forward(row, experts.new_zeros((1, 1)), row.new_ones((1, 1)))
            return out[:0]
        weights = rows.new_ones((len(rows), 1))
        computed: Tensor = super().forward(rows, experts.unsqueeze(1), weights)
        return computed


def _by_choice(index: Tensor, weights: Tensor, num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Indices and weights as (choices, tokens); some routers give a weight for every expert."""
    chosen = index.reshape(num_tokens, -1)
    given = weights.reshape(num_tokens, -1)
    if given.shape != chosen.shape and given.shape[1] == num_experts:
        given = given.gather(1, chosen)
    return chosen.t().contiguous(), given.t().contiguous()


def spread_names(model: nn.Module, ep: int) -> tuple[str, ...]:
    """The modules of experts that mesh.ep spreads; none if it is 1."""
    return tuple(placed_experts(model)) if ep > 1 else ()
