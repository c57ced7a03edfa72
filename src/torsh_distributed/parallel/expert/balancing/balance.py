"""Live balancing: moves experts, with their gradients and optimizer state, between unevenly loaded ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.expert.balancing.lending import COPY_ROWS, worth_lending
from torsh_distributed.parallel.expert.balancing.placement import Placement, variation
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.parallel.expert.stacked_experts import move_stack, stacked_state

_MIN_GAIN = 0.01
"""A move must take at least this share of load from the busiest rank to pay for its traffic."""


class LoadBalancer:
    """After optimizer steps, moves experts if the ranks are loaded too unevenly.

    All ranks know all loads, so they decide alike. Experts move if the coefficient of variation of the ranks' smoothed
    load exceeds `rebalance_threshold`, at most once in `rebalance_cooldown_steps`. If one expert alone is too much for
    a rank, moving does not help; then experts are lent, up to `hot_copies` to each rank.
    """

    def __init__(self, layers: Mapping[str, MoELayer], optimizer: Optimizer) -> None:
        self._layers = {
            name: layer for name, layer in layers.items() if layer.group is not None and layer.config.watches_load
        }
        self._steps_since = dict.fromkeys(self._layers, 0)
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def close(self) -> None:
        """Stop moving and lending experts."""
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, layer in self._layers.items():
            self._steps_since[name] += 1
            if self._steps_since[name] < layer.config.rebalance_cooldown_steps or layer.smoothed_load is None:
                continue
            chosen = _better(layer)
            if chosen is not None:
                rebalance(layer, chosen, optimizer, name=name)
            if layer.config.hot_copies:
                _lend(layer, name)
            if chosen is not None or layer.config.hot_copies:
                self._steps_since[name] = 0


def rebalance(layer: MoELayer, placement: Placement, optimizer: Optimizer | None = None, *, name: str = "") -> None:
    """Move the layer's experts to `placement`; every rank of its group calls this, between two steps.

    Weights, gradients and optimizer state move bit for bit; the layer's results do not change.
    """
    old = layer.placement
    if layer.group is None or sorted(placement.expert_of_slot) != sorted(old.expert_of_slot):
        raise InvalidArgument(
            "the placement does not fit the layer's experts, or they are not spread over ranks",
            hint="start from layer.placement: layer.placement.balanced(loads)",
            num_experts=layer.config.num_experts,
            placement=placement.expert_of_slot,
        )
    started = time.monotonic()
    moved_bytes = 0
    for param in layer.experts.stacked().values():
        stacks = [param.data, *([] if param.grad is None else [param.grad])]
        if optimizer is not None:
            stacks += [value for _, value in stacked_state(layer, param, optimizer)]
        for stack in stacks:
            moved, num_left = move_stack(stack, old, placement, layer.group)
            stack.copy_(moved)
            moved_bytes += num_left * moved[0].numel() * moved.element_size()
    layer.placement, layer.lending = placement, None
    layer.experts.here = placement.experts_of(layer.ep_rank)
    loads = layer.smoothed_load or [1 / layer.config.num_experts] * layer.config.num_experts
    events.emit(
        events.RebalanceEvent(
            layer=name,
            num_moved=sum(
                old.slot_of_expert[expert] // old.per_rank != placement.slot_of_expert[expert] // old.per_rank
                for expert in range(layer.config.num_experts)
            ),
            max_load_before=max(old.rank_loads(loads)),
            max_load_after=max(placement.rank_loads(loads)),
            moved_bytes=moved_bytes,
            duration_s=time.monotonic() - started,
        )
    )


def _better(layer: MoELayer) -> Placement | None:
    """A placement that is worth a move, or None; computed from numbers that are equal on every rank."""
    loads, threshold = layer.smoothed_load, layer.config.rebalance_threshold
    assert loads is not None
    if threshold is None:
        return None
    before = layer.placement.rank_loads(loads)
    if variation(before) <= threshold:
        return None
    chosen = layer.placement.balanced(loads)
    return chosen if max(chosen.rank_loads(loads)) <= (1 - _MIN_GAIN) * max(before) else None


def _lend(layer: MoELayer, name: str) -> None:
    """Decide again what the layer lends, from numbers that are equal on every rank."""
    loads, decision, group = layer.smoothed_load, layer.decision, layer.group
    assert loads is not None
    assert decision is not None
    assert group is not None
    assert layer.router.data_group is not None
    # Rows of each expert, at most its capacity, in one forward of one group of ranks that holds all experts.
    total = int(decision.demand.sum())
    most = total if decision.capacity is None else decision.capacity
    num_groups = layer.router.data_group.size() // group.size()
    rows = [round(min(load * total, most) / num_groups) for load in loads]
    copy_rows = COPY_ROWS.get(layer.experts.up.device.type, COPY_ROWS["cuda"])
    lending = worth_lending(layer.placement, rows, most=layer.config.hot_copies, copy_rows=copy_rows)
    if lending == layer.lending:
        return
    layer.lending = lending
    before = layer.placement.rank_loads(rows)
    after = before if lending is None else lending.rank_rows(rows)
    events.emit(
        events.LendingEvent(
            layer=name,
            borrowed=((),) * group.size() if lending is None else lending.borrowed,
            max_load_before=max(before) / max(sum(rows), 1),
            max_load_after=max(after) / max(sum(rows), 1),
        )
    )
