"""Capacity and overflow of experts, counted over all ranks that share a batch.

Why over all ranks: a rank that counts alone would drop other tokens than one process with the whole batch, so training
would depend on the number of ranks. The choices of each expert form a queue: first choices before second ones, then by
rank, then by position in the rank's batch, which is the order in one process.

Every rank computes this from the counts of all, so it knows what the others send without asking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.plan.sections.expert import ExpertConfig


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
