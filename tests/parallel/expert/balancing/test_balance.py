"""Experts that move: where to, when, and that only their rank changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.expert.balancing.balance import LoadBalancer, rebalance
from torsh_distributed.parallel.expert.balancing.lending import COPY_ROWS, Lending
from torsh_distributed.parallel.expert.balancing.placement import Placement, variation
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.parallel.expert.stacked_experts import gather_stack
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.plan.sections.mesh import MeshConfig


@given(
    data=st.data(),
    num_ranks=st.integers(1, 5),
    per_rank=st.integers(1, 5),
)
def test_a_balanced_placement_has_every_expert_once_and_moves_few(
    data: st.DataObject, num_ranks: int, per_rank: int
) -> None:
    num_experts = num_ranks * per_rank
    loads = data.draw(st.lists(st.floats(0, 1), min_size=num_experts, max_size=num_experts))
    placement = Placement(tuple(data.draw(st.permutations(range(num_experts)))), num_ranks)
    chosen = placement.balanced(loads)
    assert sorted(chosen.expert_of_slot) == list(range(num_experts))
    assert [chosen.expert_of_slot[slot] for slot in chosen.slot_of_expert] == list(range(num_experts))
    if per_rank == 1:
        assert chosen == placement, "with one expert a rank there is nothing to gain"
    for rank in range(num_ranks):
        for slot, expert in enumerate(placement.experts_of(rank)):
            if expert in chosen.experts_of(rank):
                assert chosen.experts_of(rank)[slot] == expert, "an expert that stays keeps its slot"


def test_two_hot_neighbours_are_separated() -> None:
    placement = Placement.contiguous(4, 2)
    loads = [0.4, 0.4, 0.1, 0.1]
    assert placement.rank_loads(loads) == pytest.approx([0.8, 0.2])
    assert variation(placement.rank_loads(loads)) == pytest.approx(0.6)
    chosen = placement.balanced(loads)
    assert chosen.rank_loads(loads) == pytest.approx([0.5, 0.5])
    assert variation([0.0, 0.0]) == 0.0


def tokens_for(rank: int) -> Tensor:
    return torch.randn(40, 6, generator=torch.Generator().manual_seed(rank)).abs()


def make(threshold: float | None, cooldown: int = 1) -> tuple[MoELayer, torch.optim.Optimizer]:
    torch.manual_seed(4)
    config = ExpertConfig(
        num_experts=6, overflow="none", rebalance_threshold=threshold, rebalance_cooldown_steps=cooldown
    )
    layer = MoELayer(6, 8, config, group=dist.group.WORLD)
    return layer, torch.optim.AdamW(layer.experts.parameters(), lr=0.01)


def step(layer: MoELayer, optimizer: torch.optim.Optimizer) -> None:
    layer(tokens_for(dist.get_rank())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(layer: MoELayer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, param in layer.experts.named_parameters():
        found[name] = gather_stack(param, layer)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = gather_stack(optimizer.state[param][key], layer)
    return found


def move_by_hand() -> None:
    layer, optimizer = make(None)
    step(layer, optimizer)
    inputs = tokens_for(dist.get_rank())
    before, out = whole(layer, optimizer), layer(inputs)
    local = layer.experts.up.detach().clone()
    layer.lending = Lending(layer.placement, ((3,), ()))
    rebalance(layer, Placement((5, 0, 2, 4, 1, 3), 2), optimizer)
    assert layer.lending is None, "lent by a placement that is no more"
    assert not torch.equal(layer.experts.up, local), "nothing moved"
    assert torch.equal(layer(inputs), out), "outputs changed"
    after = whole(layer, optimizer)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    # Training goes on as it would have: the state moved with the weights.
    twin, twin_optimizer = make(None)
    step(twin, twin_optimizer)
    for _ in range(3):
        step(layer, optimizer)
        step(twin, twin_optimizer)
    for name, value in whole(twin, twin_optimizer).items():
        torch.testing.assert_close(whole(layer, optimizer)[name], value, rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(InvalidArgument, match=r"placement=\(0, 0, 1, 2, 3, 4\)"):
        rebalance(layer, Placement((0, 0, 1, 2, 3, 4), 2))


def move_by_load() -> tuple[list[Any], list[list[int]]]:
    """The gate likes experts 0 and 1, which are neighbours on rank 0."""
    seen: list[events.RebalanceEvent] = []
    end = events.subscribe(seen.append, events.RebalanceEvent)  # type: ignore[arg-type]
    layer, optimizer = make(0.3, cooldown=3)
    with torch.no_grad():
        layer.router.gate.experts.weight[:2] += 2
    balancer = LoadBalancer({"layer": layer}, optimizer)
    rows = []
    for _ in range(8):
        layer(tokens_for(dist.get_rank()))
        load = layer.stats().load
        rows.append([sum(load[expert] for expert in layer.placement.experts_of(rank)) for rank in range(2)])
        step(layer, optimizer)
    balancer.close()
    end()
    still, still_optimizer = make(5.0)
    LoadBalancer({"layer": still}, still_optimizer)
    step(still, still_optimizer)
    assert still.placement == Placement.contiguous(6, 2), "below the threshold nothing moves"
    return seen, rows


def test_moved_experts_compute_the_same_bits_and_take_their_state_along(world: World) -> None:
    world.run(move_by_hand, backend="shm")


def test_uneven_ranks_are_balanced_after_the_cooldown_and_the_event_shows_the_gain(world: World) -> None:
    for seen, rows in world.run(move_by_load, backend="shm"):
        assert len(seen) == 1, "one move makes it even enough"
        [event] = seen
        assert event.layer == "layer"
        assert event.num_moved >= 2
        assert event.moved_bytes > 0
        assert event.max_load_after < 0.8 * event.max_load_before
        assert rows[0] == rows[1] == rows[2], "moved before the cooldown was over"
        assert max(rows[3]) < 0.8 * max(rows[2]), "the event promised a gain that is not there"


def lend_by_load(overflow: Any, copy_rows: int) -> list[tuple[bool, list[tuple[int, ...]]]]:
    """After each of five steps: whether anything is lent, and what was announced. All tokens choose expert 0."""
    COPY_ROWS["cpu"] = copy_rows
    seen: list[events.LendingEvent] = []
    end = events.subscribe(seen.append, events.LendingEvent)  # type: ignore[arg-type]
    torch.manual_seed(4)
    config = ExpertConfig(
        num_experts=6, overflow=overflow, capacity_factor=0.2, hot_copies=1, rebalance_cooldown_steps=3
    )
    layer = MoELayer(6, 8, config, group=Mesh(MeshConfig(ep=2)).group("ep"), data_group=dist.group.WORLD)
    with torch.no_grad():
        layer.router.gate.experts.weight[0] += 2
    optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.0)
    balancer = LoadBalancer({"layer": layer}, optimizer)
    found = []
    for _ in range(5):
        step(layer, optimizer)
        found.append((layer.lending is not None, [some for event in seen for some in event.borrowed]))
    with torch.no_grad():
        layer.router.gate.experts.weight[0] -= 10
    for _ in range(40):
        step(layer, optimizer)
    assert layer.lending is None or 0 not in layer.lending.borrowed[1], "still lent when no longer hot"
    balancer.close()
    end()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "overflow", "copy_rows", "is_lent"),
    [
        (2, "none", 20, True),
        (2, "none", 50, False),
        (4, "none", 20, True),
        (4, "none", 50, False),
        (2, "drop", 2, False),
    ],
)
def test_a_hot_expert_is_lent_while_that_is_worth_its_copy(
    world: World, num_ranks: int, overflow: str, copy_rows: int, is_lent: bool
) -> None:
    """Not where capacity leaves it few rows anyway; at 4 ranks, by what one of the two groups of ep has to do."""
    for found in world.run(lend_by_load, overflow, copy_rows, num_ranks=num_ranks, backend="shm"):
        assert [lent for lent, _ in found] == [False, False, is_lent, is_lent, is_lent]
        assert found[-1][1] == ([(), (0,)] if is_lent else [])
