"""How tokens are routed to experts: the `expert` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section

Overflow = Literal["drop", "reroute", "none"]
Initialization = Literal["xavier", "kaiming", "normal", "uniform", "truncated_normal"]


class ExpertConfig(Section):
    """Routing in mixture-of-experts layers; mesh.ep is the number of ranks that experts are spread over."""

    num_experts: int = Field(default=8, ge=1)
    """Experts in a layer, over all ranks."""

    num_experts_per_token: int = Field(default=2, ge=1)
    """Experts that each token is sent to."""

    capacity_factor: float = Field(default=1.25, gt=0)
    """Capacity of an expert, as a multiple of an even share of tokens. Larger drops fewer; smaller computes less."""

    overflow: Overflow = "drop"
    """What happens to a token whose expert is full: it skips that expert, or goes to the least loaded one at half its
    weight. With `none`, experts have no limit."""

    normalize_weights: bool = False
    """Scale the weights of a token's experts to sum to 1. Otherwise they are the gate's probabilities."""

    load_balance_loss_coeff: float = Field(default=0.01, ge=0)
    """Weight of the loss that balances the experts' load."""

    router_z_loss_coeff: float = Field(default=0.001, ge=0)
    """Weight of the loss that keeps router logits small."""

    router_jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, the gate's input is multiplied by a random factor within this of 1, so near ties are explored."""

    gate_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the gate's input in training."""

    gate_layers: int = Field(default=1, ge=1)
    """Linear layers of the gate, with GELU between them."""

    gate_groups: int = Field(default=1, ge=1)
    """Groups of experts. With more than one, the gate chooses a group, then an expert; for many experts."""

    gate_grouping: Literal["static", "learned"] = "static"
    """Which expert is in which group: neighbours, or learned with the gate."""

    gate_top_groups: int | None = Field(default=None, ge=1)
    """Groups that a token may choose its experts from. Fewer keep a token on fewer ranks. Left out: all."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of an expert's hidden values in training."""

    initialization: Initialization = "xavier"
    """How the weights of experts are initialized."""

    placement: Literal["contiguous", "replicated"] = "contiguous"
    """Where experts are: neighbours on one rank of mesh.ep, or all of them on every rank."""

    rebalance_threshold: float | None = Field(default=None, gt=0)
    """Move experts between ranks when the coefficient of variation of the ranks' load exceeds this; 0.3 is a good
    start. Left out: experts stay where they are."""

    rebalance_cooldown_steps: int = Field(default=100, ge=1)
    """Optimizer steps between moves of experts, and between decisions about which to lend."""

    hot_copies: int = Field(default=0, ge=0)
    """Experts of overloaded ranks that another rank may compute in addition to its own: it borrows their weights in
    each forward. Which ones is decided every `rebalance_cooldown_steps` steps."""

    load_smoothing: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the history in the load that balancing uses; the rest is the last step's."""

    @property
    def watches_load(self) -> bool:
        """Whether the load of experts is recorded, to move or lend them."""
        return self.rebalance_threshold is not None or self.hot_copies > 0

    @classmethod
    def small_scale(cls) -> Self:
        """Eight experts, all of them on every rank: no token is sent."""
        return cls(placement="replicated", overflow="none")

    @classmethod
    def large_scale(cls) -> Self:
        """128 experts in 16 groups spread over mesh.ep, with more room, a gentler balance loss, and live balancing."""
        return cls(
            num_experts=128,
            gate_groups=16,
            capacity_factor=1.5,
            load_balance_loss_coeff=0.001,
            rebalance_threshold=0.3,
            rebalance_cooldown_steps=50,
        )

    @classmethod
    def inference(cls) -> Self:
        """Every token gets its experts, without the losses that only training needs."""
        return cls(overflow="none", load_balance_loss_coeff=0.0, router_z_loss_coeff=0.0)

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.num_experts_per_token > self.num_experts:
            yield Problem(
                "num_experts_per_token",
                f"expert.num_experts_per_token {self.num_experts_per_token} is above expert.num_experts"
                f" {self.num_experts}",
                "a token cannot go to more experts than there are",
            )
        if self.normalize_weights and self.num_experts_per_token == 1:
            yield Problem(
                "normalize_weights",
                "expert.normalize_weights with expert.num_experts_per_token 1 makes every weight 1, and the gate learns"
                " nothing",
                "set expert.normalize_weights = false, or send a token to 2 experts",
            )
        if self.placement == "replicated" and self.rebalance_threshold is not None:
            yield Problem(
                "rebalance_threshold",
                f"expert.rebalance_threshold {self.rebalance_threshold:g} has nothing to move: every rank has every"
                " expert",
                'leave expert.rebalance_threshold out, or set expert.placement = "contiguous"',
            )
        if self.placement == "replicated" and self.hot_copies:
            yield Problem(
                "hot_copies",
                f"expert.hot_copies {self.hot_copies} has nothing to lend: every rank has every expert",
                'leave expert.hot_copies out, or set expert.placement = "contiguous"',
            )
        if self.hot_copies >= self.num_experts:
            yield Problem(
                "hot_copies",
                f"expert.hot_copies {self.hot_copies} is not below expert.num_experts {self.num_experts}",
                "a rank borrows experts that it does not hold; 1 is a good start",
            )
        yield from self._group_problems()

    def _group_problems(self) -> Iterator[Problem]:
        if self.num_experts % self.gate_groups:
            yield Problem(
                "gate_groups",
                f"expert.gate_groups {self.gate_groups} does not divide expert.num_experts {self.num_experts}",
                "all groups have the same number of experts",
            )
            return
        if self.gate_grouping == "learned" and (self.gate_groups == 1 or self.gate_top_groups is not None):
            yield Problem(
                "gate_grouping",
                "expert.gate_grouping = learned needs expert.gate_groups above 1, and no expert.gate_top_groups",
                "learned groups share every expert, so none of them can be left out",
            )
        if self.gate_top_groups is None:
            return
        size = self.num_experts // self.gate_groups
        reachable = self.gate_top_groups * size
        if self.gate_top_groups > self.gate_groups or reachable < self.num_experts_per_token:
            yield Problem(
                "gate_top_groups",
                f"expert.gate_top_groups {self.gate_top_groups} of {self.gate_groups} groups of {size} does not give "
                f"a token {self.num_experts_per_token} experts to choose",
                "raise it, to at most expert.gate_groups",
            )
