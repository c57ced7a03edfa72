"""The mixture-of-experts layer: a feed-forward layer in which each token uses only a few experts."""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.shared_memory.buffers import new_rows, takes_rows
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.compiling import outside_graphs
from torsh_distributed.parallel.expert.balancing.lending import Lending, Stacks, lend
from torsh_distributed.parallel.expert.balancing.placement import Placement
from torsh_distributed.parallel.expert.dispatch import (
    ExchangeSizes,
    RowLayout,
    collect,
    combine,
    dispatch,
    permute,
    reorder,
)
from torsh_distributed.parallel.expert.experts import Activation, Experts
from torsh_distributed.parallel.expert.grouped import NewRows, can_group, segments_of
from torsh_distributed.parallel.expert.router import ExpertRouter, RoutingDecision
from torsh_distributed.parallel.expert.routing_stats import RoutingClock, RoutingStats
from torsh_distributed.parallel.models.probing import is_probing
from torsh_distributed.plan.sections.expert import ExpertConfig

staged_auxiliary_loss: ContextVar[Tensor | None] = ContextVar("staged_auxiliary_loss", default=None)
"""In a pipeline, while the loss is computed: the sum of the auxiliary losses of all stages, also on other ranks."""


class MoELayer(nn.Module):
    """Routes each token to a few experts, on any rank, and adds up their outputs, weighted by the gate.

    Without groups all experts are here. `group` is the ranks that experts are spread over (mesh.ep); `data_group`
    those that share a batch, over which load and capacity are counted (default: `group`). Every rank of both calls
    forward equally often. In: (..., input_dim); out: (..., output_dim), tokens in the same order. After forward, add
    `auxiliary_loss` to the loss (see `auxiliary_loss()`).
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        config: ExpertConfig | None = None,
        *,
        output_dim: int | None = None,
        activation: Activation = "gelu",
        bias: bool = True,
        num_experts_per_token: int | None = None,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = _clamped(config or ExpertConfig(), num_experts_per_token)
        self.input_dim, self.hidden_dim = input_dim, hidden_dim
        self.output_dim = input_dim if output_dim is None else output_dim
        _check_sizes(input_dim=input_dim, hidden_dim=hidden_dim, output_dim=self.output_dim)
        self.group = group if self.config.placement == "contiguous" else None
        data_group = data_group or group
        self.placement = Placement.contiguous(self.config.num_experts, 1 if self.group is None else self.group.size())
        self.router = ExpertRouter(input_dim, self.config, data_group=data_group, device=device, dtype=dtype)
        self.experts = Experts(
            input_dim,
            hidden_dim,
            self.output_dim,
            self.config,
            here=self.placement.experts_of(self.ep_rank),
            activation=activation,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.decision: RoutingDecision | None = None
        """The routing of the last forward."""
        self.smoothed_load: list[float] | None = None
        """By expert: moving average of the demand in training; kept only if experts may move or be lent."""
        self.lending: Lending | None = None
        """Which experts are lent in training; may change between steps, equally on all ranks."""
        self._check_agreement()

    @property
    def num_experts(self) -> int:
        """How many experts the layer has on all ranks together."""
        return self.config.num_experts

    @property
    def ep_rank(self) -> int:
        """This rank's rank in the group that experts are spread over."""
        return 0 if self.group is None else self.group.rank()

    @property
    def auxiliary_loss(self) -> Tensor:
        """Balance loss and z-loss of the last forward, with their coefficients: this rank's part of the mean."""
        if self.decision is None:
            raise InvalidArgument("there is no auxiliary loss before the first forward", hint="call the layer first")
        return self.decision.auxiliary_loss

    def stats(self) -> RoutingStats:
        """Statistics of the last batch."""
        if self.decision is None:
            raise InvalidArgument("there are no statistics before the first forward", hint="call the layer first")
        return RoutingStats.of(self.decision)

    def spread(self, group: dist.ProcessGroup, data_group: dist.ProcessGroup | None = None) -> None:
        """Keep only this rank's experts; every rank of `group` calls this, with equal experts.

        Parameters stay the same objects, with fewer entries: an optimizer that has not been used yet stays valid.
        """
        if self.group is not None:
            raise InvalidArgument(
                "the layer's experts are spread already", hint="pass the group once: to MoELayer or to spread"
            )
        self.router.data_group = data_group or group
        if self.config.placement == "replicated" or group.size() == 1:
            self._check_agreement()
            return
        self.placement = Placement.contiguous(self.config.num_experts, group.size())
        self.group = group
        self._check_agreement()
        self.experts.keep(self.placement.experts_of(self.ep_rank))

    @override
    @outside_graphs
    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        clock = RoutingClock(tokens.device) if events.wanted(events.RoutingEvent) else None
        decision = self.router(tokens)
        self.decision = decision
        self._observe(decision, clock)
        kind = tokens.device.type
        if torch.is_autocast_enabled(kind):
            tokens = tokens.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            if self.group is None:
                layout = self._layout(decision, self._order(decision))
                done = self._run(permute(tokens, layout), decision.sends[self._data_rank].unsqueeze(0))
                out = combine(done, decision.weights, layout)
            else:
                out = self._run_spread(tokens, decision, self.group)
        return out.view(*inputs.shape[:-1], self.output_dim)

    def _order(self, decision: RoutingDecision) -> Tensor:
        """Choices sorted by slot (by rank, then by place on it), without the dropped ones."""
        slots = self._slots(decision.experts).flatten()
        if slots.is_cuda and self.config.num_experts < 2**8:
            slots = slots.to(torch.uint8)  # CUDA sorts byte by byte: one pass instead of eight
        order = slots.argsort(stable=True)
        if not decision.is_dropless:
            order = order[: int(decision.sends[self._data_rank].sum())]
        return order

    @staticmethod
    def _layout(decision: RoutingDecision, order: Tensor) -> RowLayout:
        num_choices, num_tokens = decision.experts.shape
        return RowLayout.of(order, num_choices=num_choices, num_tokens=num_tokens)

    def _run_spread(self, tokens: Tensor, decision: RoutingDecision, group: dist.ProcessGroup) -> Tensor:
        """Send rows to the ranks of their experts, and add up the results that come back."""
        if self.lending is not None and self.training:
            return self._run_lent(tokens, decision, group, self.lending)
        ranks = self.placement.num_ranks
        by_slot = decision.sends[:, list(self.placement.expert_of_slot)]
        by_rank = by_slot[self._members()].view(ranks, ranks, self.placement.per_rank)
        incoming = by_rank[:, self.ep_rank]
        layout = self._layout(decision, self._order(decision))
        sizes = ExchangeSizes(by_rank[self.ep_rank].sum(dim=1).tolist(), incoming.sum(dim=1).tolist(), group)
        makes = partial(new_rows, group=group) if takes_rows(tokens, group) else None
        done = self._run(dispatch(tokens, layout, sizes), incoming, makes=makes)
        return collect(done, decision.weights, layout, sizes)

    def _run_lent(
        self, tokens: Tensor, decision: RoutingDecision, group: dist.ProcessGroup, lending: Lending
    ) -> Tensor:
        """The same, with the rows of lent experts divided among ranks."""
        me = self.ep_rank
        divided = lending.divide(decision.sends[self._members()].tolist())
        incoming = [by_rank[me] for by_rank in divided]
        layout = self._layout(decision, lending.reorder(self._order(decision), divided[me]))
        sizes = ExchangeSizes([sum(places) for places in divided[me]], [sum(places) for places in incoming], group)
        own, borrowed = lend(dict(self.experts.stacked()), lending, group, tokens.dtype)
        rows, counts = dispatch(tokens, layout, sizes), torch.tensor(incoming)
        done = self._run_both(rows, counts, own, borrowed) if lending.borrowed[me] else self._run(rows, counts, own)
        return collect(done, decision.weights, layout, sizes)

    def _run_both(self, rows: Tensor, counts: Tensor, own: Stacks, borrowed: Stacks) -> Tensor:
        """The outputs of own and borrowed experts for rows sorted by source, then by expert."""
        order = _by_expert(counts).to(rows.device)
        inverse = order.argsort()
        per_rank = self.placement.per_rank
        by_stack = torch.split(counts.sum(dim=0, keepdim=True), [per_rank, counts.shape[1] - per_rank], dim=1)
        parts = torch.split(reorder(rows, order, inverse), [int(some.sum()) for some in by_stack])
        done = [self._run(*given) for given in zip(parts, by_stack, (own, borrowed), strict=True)]
        return reorder(torch.cat(done), inverse, order)

    def _run(self, rows: Tensor, counts: Tensor, weights: Stacks | None = None, makes: NewRows | None = None) -> Tensor:
        """The experts' outputs for rows sorted by source, then by expert. counts: (sources, experts) rows of each."""
        out: Tensor
        if not (can_group(rows, self.experts.up) and can_group(rows, self.experts.down)):
            out = self.experts(rows, segments_of(counts.tolist()), weights, makes)
        elif len(counts) == 1:
            out = self.experts(rows, counts[0].to(rows.device), weights)
        else:
            order = _by_expert(counts).to(rows.device)
            inverse = order.argsort()
            out = self.experts(reorder(rows, order, inverse), counts.sum(dim=0).to(rows.device), weights)
            out = reorder(out, inverse, order)
        return out

    @property
    def _data_rank(self) -> int:
        return 0 if self.router.data_group is None else self.router.data_group.rank()

    def _slots(self, experts: Tensor) -> Tensor:
        """The slot of each choice; dropped choices have a number after all slots."""
        if self.placement.expert_of_slot == tuple(range(self.config.num_experts)):
            return experts
        table = [*self.placement.slot_of_expert, self.config.num_experts]
        return torch.tensor(table, device=experts.device)[experts]

    def _members(self) -> list[int]:
        """The ranks of `group` as ranks of the data group, by which counts are indexed."""
        assert self.group is not None
        assert self.router.data_group is not None
        everyone = dist.get_process_group_ranks(self.router.data_group)
        return [everyone.index(rank) for rank in dist.get_process_group_ranks(self.group)]

    def _observe(self, decision: RoutingDecision, clock: RoutingClock | None) -> None:
        if is_probing():
            return
        if clock is not None:
            clock.stop()
        if self.training and self.config.watches_load:
            total = max(int(decision.demand.sum()), 1)
            now = [count / total for count in decision.demand.tolist()]
            keep = 0.0 if self.smoothed_load is None else self.config.load_smoothing
            before = self.smoothed_load or now
            self.smoothed_load = [keep * old + (1 - keep) * new for old, new in zip(before, now, strict=True)]
        if clock is not None:
            stats = RoutingStats.of(decision)
            events.emit(
                events.RoutingEvent(
                    num_tokens=stats.num_tokens,
                    num_routed=stats.num_routed,
                    num_dropped=stats.num_dropped,
                    load=stats.load,
                    load_variation=stats.load_variation,
                    capacity_use=stats.capacity_use,
                    gate_entropy=stats.gate_entropy,
                    duration_s=clock.duration_s(),
                )
            )

    def _check_agreement(self) -> None:
        """Raise ConfigurationError on every rank unless all of the group built the same layer."""
        group = self.router.data_group
        if group is None or group.size() == 1:
            return
        mine = {
            **self.config.model_dump(),
            "input_dim": self.input_dim,
            "hidden_dim": self.hidden_dim,
            "output_dim": self.output_dim,
            "activation": self.experts.activation,
            "bias": self.experts.up_bias is not None,
            "ep": self.placement.num_ranks,
            "dtype": str(self.experts.up.dtype),
        }
        hint = "build the layer from the same plan on every rank"
        require_same(mine, group=group, what="the ranks' layers", hint=hint)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.config.num_experts} experts, {self.config.num_experts_per_token} per token, "
            f"over {self.placement.num_ranks} ranks"
        )


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The mixture-of-experts layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The sum of the auxiliary losses of a model's last forward, to add to the loss. 0 for a model without experts."""
    carried = staged_auxiliary_loss.get()
    if carried is not None:
        return carried
    losses = [layer.auxiliary_loss for layer in moe_layers(model).values()]
    return torch.stack(losses).sum() if losses else torch.zeros(())


def _clamped(config: ExpertConfig, num_experts_per_token: int | None) -> ExpertConfig:
    """The config with another k, at most the number of experts; only a plan refuses a larger one."""
    if num_experts_per_token is None:
        return config
    if num_experts_per_token > config.num_experts:
        warnings.warn(
            f"num_experts_per_token {num_experts_per_token} is above the {config.num_experts} experts there are; "
            f"every token goes to all {config.num_experts}",
            stacklevel=3,
        )
    return config.replace(num_experts_per_token=min(num_experts_per_token, config.num_experts))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InvalidArgument(
                f"{name} must be at least 1", hint="a layer needs at least one value in and out", got=size
            )


def _by_expert(incoming: Tensor) -> Tensor:
    """The order that sorts rows by expert; they arrive by source, then by expert. incoming: (sources, experts)."""
    num_sources, num_experts = incoming.shape
    expert_of_row = torch.arange(num_experts).repeat(num_sources).repeat_interleave(incoming.flatten())
    return expert_of_row.argsort(stable=True)
