"""The router: which experts each token goes to, with which weights, and the auxiliary losses.

Capacity and overflow of experts, counted over all ranks that share a batch.
Why over all ranks: a rank that counts alone would drop other tokens than one process with the whole batch, so training
would depend on the number of ranks. The choices of each expert form a queue: first choices before second ones, then by
rank, then by position in the rank's batch, which is the order in one process.

Every rank computes this from the counts of all, so it knows what the others send without asking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_gather
from torsh_distributed.errors import TensorShapeMismatch
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


def capacity_of(num_tokens: int, config: ExpertConfig) -> int | None:
    """The most rows an expert takes from a batch of `num_tokens` over all ranks; None: unlimited."""
    if config.overflow == "none":
        return None
    return math.ceil(num_tokens * config.num_experts_per_token / config.num_experts * config.capacity_factor)


@dataclass(frozen=True)
class Admission:
    """Which choices are admitted, on all ranks; int64 tensors."""

    sends: Tensor
    """(ranks, experts): rows that each rank sends to each expert."""

    room: Tensor | None
    """(ranks, choices, experts): how many of a rank's choices an expert has room for; None: for all."""

    fallback: Tensor | None
    """(rerouted,): the experts that refused choices go to, in queue order; None without rerouting."""

    fallback_start: Tensor | None
    """(ranks, choices): where a rank's choices start in `fallback`."""


def admit(counts: Tensor, capacity: int | None, *, reroute: bool) -> Admission:
    """Fill the experts. counts: (ranks, choices, experts), how many tokens of each rank chose each expert."""
    if capacity is None:
        return Admission(counts.sum(dim=1), None, None, None)
    num_ranks, num_choices, num_experts = counts.shape
    line = counts.transpose(0, 1).reshape(-1, num_experts)
    before = line.cumsum(dim=0) - line
    taken = torch.minimum((capacity - before).clamp(min=0), line)
    room = taken.view(num_choices, num_ranks, num_experts).transpose(0, 1)
    sends = room.sum(dim=1)
    if not reroute:
        return Admission(sends, room, None, None)
    refused = (line - taken).sum(dim=1)
    load = sends.sum(dim=0)
    # Free places, lowest level first: in this order the next one always belongs to the least loaded expert.
    levels = torch.arange(capacity, device=counts.device).unsqueeze(1)
    fallback = torch.nonzero(levels >= load)[:, 1][: int(refused.sum())]
    whose = torch.arange(num_ranks, device=counts.device).repeat(num_choices).repeat_interleave(refused)
    sends = sends.flatten().scatter_add(0, whose[: len(fallback)] * num_experts + fallback, torch.ones_like(fallback))
    start = (refused.cumsum(dim=0) - refused).view(num_choices, num_ranks).t()
    return Admission(sends.view(num_ranks, num_experts), room, fallback, start)


def settle(experts: Tensor, admission: Admission, *, rank: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """This rank's choices after admission, and which of them are rerouted.

    experts: (choices, tokens), the experts chosen. In the result a dropped choice is `num_experts`.
    """
    if admission.room is None:
        return experts, torch.zeros_like(experts, dtype=torch.bool)
    room = admission.room[rank].to(experts.device)
    is_refused = _place_in_line(experts, num_experts) >= room.gather(1, experts)
    settled = experts.masked_fill(is_refused, num_experts)
    if admission.fallback is None or admission.fallback_start is None:
        return settled, torch.zeros_like(is_refused)
    start = admission.fallback_start[rank].to(experts.device).unsqueeze(1)
    place = start + is_refused.cumsum(dim=1) - 1
    is_rerouted = is_refused & (place < len(admission.fallback))
    settled[is_rerouted] = admission.fallback.to(experts.device)[place[is_rerouted]]
    return settled, is_rerouted


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """(choices, experts): how many tokens chose each expert. experts: (choices, tokens)."""
    counts = torch.zeros((len(experts), num_experts), dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(1, experts, torch.ones_like(experts))


def _place_in_line(experts: Tensor, num_experts: int) -> Tensor:
    """(choices, tokens): how many earlier tokens chose the same expert with the same choice (first, second, …)."""
    num_choices, num_tokens = experts.shape
    keys = (experts + num_experts * torch.arange(num_choices, device=experts.device).unsqueeze(1)).flatten()
    order = keys.argsort(stable=True)
    counts = count_choices(experts, num_experts).flatten()
    starts = counts.cumsum(dim=0) - counts
    places = torch.empty_like(keys)
    places[order] = torch.arange(len(keys), device=keys.device)
    return (places - starts[keys]).view(num_choices, num_tokens)


_FEW = 4
"""Up to this many choices, repeated argmax is faster on a CPU than torch's top-k."""


@dataclass(frozen=True)
class RoutingDecision:
    """Where this rank's tokens go, and the load of the experts over all ranks."""

    experts: Tensor
    """(choices, tokens) int64: the expert of each choice; `num_experts` if the choice is dropped."""

    weights: Tensor
    """(choices, tokens): the weight of the expert's output; differentiable."""

    demand: Tensor
    """(experts,) int64: choices of all ranks, before capacity."""

    sends: Tensor
    """(ranks, experts) int64: rows that each rank sends to each expert."""

    is_dropless: bool
    num_tokens: int
    """Of all ranks."""

    capacity: int | None
    """The most rows an expert takes, over all ranks; None: unlimited."""

    num_rerouted: Tensor
    """Choices of this rank that went to another expert, at half their weight."""

    probabilities: Tensor
    """(tokens, experts): the gate's output for this rank's tokens; detached."""

    load_balance_loss: Tensor
    """This rank's part of the Switch Transformer's balance loss, which is 1 if all experts are used equally. The mean
    over ranks, weighted by their tokens, is the loss of the whole batch."""

    router_z_loss: Tensor
    auxiliary_loss: Tensor
    """The sum of both, with their coefficients."""


class ExpertRouter(nn.Module):
    """Top-k routing by a trainable gate; every rank of `data_group` calls forward together.

    Ranks exchange their counts of choices, so capacity and the balance loss are those of the whole batch.
    """

    def __init__(
        self,
        input_dim: int,
        config: ExpertConfig,
        *,
        data_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_dim = input_dim
        self.config = config
        self.data_group = data_group
        self.gate = Gate(input_dim, config, device=device, dtype=dtype)

    @override
    def forward(self, tokens: Tensor) -> RoutingDecision:
        """tokens: (tokens, input_dim)."""
        if tokens.shape[1] != self.input_dim:
            # The other ranks wait for this rank's counts: send them its width, so they raise too.
            self._exchange(None, tokens)
        scores = self.gate(tokens)
        experts, weights = self._choose(scores)
        counts = count_choices(experts, self.config.num_experts)
        everyone, num_tokens, rank = self._exchange(counts, tokens)
        capacity = capacity_of(num_tokens, self.config)
        admission = admit(everyone, capacity, reroute=self.config.overflow == "reroute")
        settled, is_rerouted = settle(experts, admission, rank=rank, num_experts=self.config.num_experts)
        num_rerouted = torch.zeros((), dtype=torch.int64)
        if admission.fallback is not None:
            weights = torch.where(is_rerouted, weights / 2, weights)
            num_rerouted = is_rerouted.sum()
        return self._decide(scores, settled, weights, everyone, admission, num_tokens, num_rerouted)

    def _choose(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """(choices, tokens) experts, best first, and their weights."""
        wanted = scores.probabilities
        if scores.candidates is not None:
            wanted = wanted.masked_fill(~scores.candidates, -1.0)
        experts = _top(wanted.detach(), self.config.num_experts_per_token)
        weights = scores.probabilities.gather(1, experts)
        if self.config.normalize_weights:
            weights = weights / weights.sum(dim=1, keepdim=True)
        return experts.t().contiguous(), weights.t()

    def _exchange(self, counts: Tensor | None, tokens: Tensor) -> tuple[Tensor, int, int]:
        """Counts (ranks, choices, experts) of all ranks, their number of tokens, and this rank's rank among them.

        Raises TensorShapeMismatch on every rank if any rank has tokens of another width; such a rank passes no counts.
        """
        shape = (self.config.num_experts_per_token, self.config.num_experts)
        if self.data_group is None or self.data_group.size() == 1:
            if counts is None:
                raise self._mismatch({0: tokens.shape[1]})
            return counts.unsqueeze(0), len(tokens), 0
        header = torch.tensor([tokens.shape[1], len(tokens)], device=tokens.device)
        values = torch.zeros(shape, dtype=torch.int64, device=tokens.device) if counts is None else counts
        message = torch.cat([header, values.flatten()])
        gathered = torch.stack(all_gather(message, group=self.data_group)).cpu()
        widths = {rank: int(width) for rank, width in enumerate(gathered[:, 0]) if width != self.input_dim}
        if widths:
            raise self._mismatch(widths)
        return gathered[:, 2:].view(-1, *shape), int(gathered[:, 1].sum()), self.data_group.rank()

    def _mismatch(self, widths: dict[int, int]) -> TensorShapeMismatch:
        return TensorShapeMismatch(
            f"the layer expects tokens of {self.input_dim} values",
            hint="the last dim of the input must be the layer's input_dim, on every rank",
            input_dim=self.input_dim,
            got_by_rank=widths,
        )

    def _decide(
        self,
        scores: Scores,
        experts: Tensor,
        weights: Tensor,
        counts: Tensor,
        admission: Admission,
        num_tokens: int,
        num_rerouted: Tensor,
    ) -> RoutingDecision:
        config, probabilities = self.config, scores.probabilities
        demand = counts.sum(dim=(0, 1))
        num_mine = max(len(probabilities), 1)
        # Linear in this rank's probabilities, given the demand of all, so the ranks' parts add up to the batch's loss.
        factor = config.num_experts / (num_mine * max(num_tokens * config.num_experts_per_token, 1))
        balance = (probabilities.sum(dim=0) @ demand.to(probabilities)) * factor
        return RoutingDecision(
            experts=experts,
            weights=weights,
            demand=demand,
            sends=admission.sends,
            is_dropless=admission.room is None,
            num_tokens=num_tokens,
            capacity=capacity_of(num_tokens, config),
            num_rerouted=num_rerouted,
            probabilities=probabilities.detach(),
            load_balance_loss=balance,
            router_z_loss=scores.z_loss,
            auxiliary_loss=config.load_balance_loss_coeff * balance + config.router_z_loss_coeff * scores.z_loss,
        )


def _top(wanted: Tensor, count: int) -> Tensor:
    """(tokens, count): the columns with the largest values, largest first; of equal ones the first."""
    if count > _FEW or wanted.device.type != "cpu":
        return wanted.topk(count, dim=1).indices
    found = []
    for number in range(count):
        best = wanted.argmax(dim=1, keepdim=True)
        found.append(best)
        if number < count - 1:
            wanted = wanted.scatter(1, best, -2.0)
    return torch.cat(found, dim=1)
