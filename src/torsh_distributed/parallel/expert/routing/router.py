"""The router: which experts each token goes to, with which weights, and the auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_gather
from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.expert.routing.admission import Admission, admit, capacity_of, count_choices, settle
from torsh_distributed.parallel.expert.routing.gate import Gate, Scores
from torsh_distributed.plan.sections.expert import ExpertConfig

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
