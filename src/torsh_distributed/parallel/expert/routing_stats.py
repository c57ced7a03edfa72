"""Statistics of a layer's routing in its last forward, and the time that the decision took."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from torsh_distributed.parallel.expert.balancing.placement import variation
from torsh_distributed.parallel.expert.router import RoutingDecision


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """The last batch of a mixture-of-experts layer, over all ranks that share it unless stated otherwise."""

    num_tokens: int
    num_choices: int
    """Tokens times experts per token: each is routed or dropped."""

    num_routed: int
    num_dropped: int
    num_rerouted: int
    """On this rank: sent to another expert than the chosen one."""

    demand: tuple[int, ...]
    """Choices of each expert, before capacity."""

    load: tuple[int, ...]
    """Rows that each expert computed."""

    load_variation: float
    """Coefficient of variation of the load: 0 if all experts have the same load."""

    most_used: int
    least_used: int
    capacity: int | None
    """The most rows an expert takes; None: unlimited."""

    capacity_use: float | None
    """Share of the total capacity that was used."""

    num_full: int | None
    """Experts with no room left."""

    gate_entropy: float
    """Mean over this rank's tokens, in nats: 0 if the gate is certain, log(experts) if it has no preference."""

    @classmethod
    def of(cls, decision: RoutingDecision) -> RoutingStats:
        """The statistics of a decision; on a GPU this waits for it."""
        demand = [int(count) for count in decision.demand.tolist()]
        load = [int(count) for count in decision.sends.sum(dim=0).tolist()]
        capacity, probabilities = decision.capacity, decision.probabilities
        entropy = -torch.special.xlogy(probabilities, probabilities).sum() / max(len(probabilities), 1)
        return cls(
            num_tokens=decision.num_tokens,
            num_choices=sum(demand),
            num_routed=sum(load),
            num_dropped=sum(demand) - sum(load),
            num_rerouted=int(decision.num_rerouted),
            demand=tuple(demand),
            load=tuple(load),
            load_variation=variation(load),
            most_used=max(range(len(load)), key=load.__getitem__),
            least_used=min(range(len(load)), key=load.__getitem__),
            capacity=capacity,
            capacity_use=sum(load) / (capacity * len(load)) if capacity else None,
            num_full=sum(rows >= capacity for rows in load) if capacity else None,
            gate_entropy=float(entropy),
        )


class RoutingClock:
    """Times a decision from here to `stop`; on a GPU by events of its stream, because the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._marks = _timing_event(), _timing_event()
            self._marks[0].record()
        self._started_s = self._ended_s = time.perf_counter()

    def stop(self) -> None:
        """The decision is made, or on a GPU under way."""
        self._ended_s = time.perf_counter()
        if self._marks is not None:
            self._marks[1].record()

    def duration_s(self) -> float:
        """Seconds that it took; on a GPU this waits for it."""
        if self._marks is None:
            return self._ended_s - self._started_s
        self._marks[1].synchronize()
        return float(self._marks[0].elapsed_time(self._marks[1]) / 1e3)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
