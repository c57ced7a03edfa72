"""`auto`: all ranks choose the same, from numbers they measured and agreed on, and remember it."""

from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.comm.algorithms.quick import quick_choice
from torsh_distributed import events
from torsh_distributed.comm.algorithms import auto_choice
from torsh_distributed.comm.algorithms.auto_choice import measure_costs, shortlist
from torsh_distributed.comm.algorithms.base import MeasuredCosts, MessageCost
from torsh_distributed.comm.algorithms.registry import ALGORITHMS
from torsh_distributed.comm.collectives.reductions import all_reduce

BACKENDS = ["gloo", "shm"]


@quick_choice()
def decide() -> list[tuple[str, str]]:
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.DecisionEvent)
    me, size = dist.get_rank(), dist.get_world_size()
    for numel in (16, 100_000, 17, 100_001, 4_000, 0):
        result = all_reduce(torch.full((numel,), float(me)), algorithm="auto")
        assert result.unique().tolist() == ([sum(range(size))] if numel else [])
    all_reduce(torch.zeros(16), algorithm="auto", deterministic=True)
    end()
    return [(event.choice, event.reason) for event in seen if isinstance(event, events.DecisionEvent)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_decides_the_same_once_for_each_size(world: World, backend: str) -> None:
    found = world.run(decide, num_ranks=3, backend=backend, timeout_s=60)
    assert found[0] == found[1] == found[2]
    small, large, deterministic = found[0]
    for chosen, reason in (small, large):
        assert chosen in (*ALGORITHMS, "backend")
        assert chosen in reason
        assert "backend" in reason
    assert ALGORITHMS[deterministic[0]].keeps_rank_order
    assert "backend" not in deterministic[1]


@pytest.mark.parametrize(
    ("rounds", "winner"),
    [
        ([{"ring": 1.0, "tree": 1.4, "backend": 9.0}, {"ring": 1.4, "tree": 1.0}, {"ring": 2.0, "tree": 1.0}], "tree"),
        ([{"ring": 1.0, "tree": 2.6, "backend": 2.6}], "ring"),  # alone after the first round
        ([{"ring": 1.0, "tree": 9.0, "backend": 1.02}, *[{"ring": 1.0, "backend": 1.02}] * 3], "backend"),  # a tie
        ([{"ring": 1.0, "tree": 1.0, "backend": 2.4}] * 2 + [{"ring": 1.0, "tree": 1.0}] * 2, "ring"),
        # What was seen before counts: the last round does not decide alone.
        (
            [{"ring": 1.0, "tree": 1.2, "backend": 9.0}, *[{"ring": 1.0, "tree": 1.2}] * 2, {"ring": 1.3, "tree": 1.2}],
            "ring",
        ),
    ],
)
def test_who_falls_behind_drops_out_and_the_rest_is_tried_longer(
    rounds: list[dict[str, float]], winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[set[str], int]] = []

    def timed(field: dict[str, object], num_bytes: int, group: object, *, num_blocks: int) -> dict[str, float]:
        asked.append((set(field), num_blocks))
        return {name: rounds[len(asked) - 1][name] * 1e-3 for name in field}

    monkeypatch.setattr(auto_choice, "_try_all", timed)
    group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # not in torch's stubs
    known, fastest = auto_choice._race(dict.fromkeys(("ring", "tree", "backend")), 64, group, num_blocks=3)
    assert fastest == winner
    assert set(known) == {"ring", "tree", "backend"}
    assert [num_blocks for _, num_blocks in asked] == [3, 6, 12, 24][: len(rounds)]
    assert len(asked) == len(rounds)


@quick_choice()
def forget() -> tuple[int, int]:
    """How many quick answers there are for a group, before and after its end."""
    group = dist.new_group([0, 1])
    for _ in range(2):
        assert all_reduce(torch.ones(4), algorithm="auto", group=group).tolist() == [2.0] * 4
    before = len(auto_choice._choosers) + len(auto_choice._left_to_backend)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return before, len(auto_choice._choosers) + len(auto_choice._left_to_backend)


def test_nothing_is_kept_of_a_group_that_is_gone(world: World) -> None:
    for before, after in world.run(forget, backend="shm"):
        assert before > 0
        assert after == 0


def alone() -> float:
    return all_reduce(torch.tensor(3.0), algorithm="auto").item()


def test_a_world_of_one_has_nothing_to_measure(world: World) -> None:
    assert math.isclose(world.run(alone, num_ranks=1)[0], 3.0)


SLOW, FAST = MessageCost(5e-4, 1e-4, 8e-9), MessageCost(5e-6, 2e-6, 2e-10)


def costs(num_ranks: int = 8, **changes: object) -> MeasuredCosts:
    return MeasuredCosts(num_ranks=num_ranks, flat=SLOW, fold_byte_s=1e-10, **changes)  # type: ignore[arg-type]


def test_small_buffers_go_by_few_steps_and_large_ones_by_small_shards() -> None:
    small, large = shortlist(64, costs(64)), shortlist(256 * 2**20, costs(64))
    assert [*small][:2] == ["doubling", "tree"]
    assert not {"doubling", "tree"} & set(large)
    assert {"ring", "reduce_scatter_all_gather"} & large.keys()


def test_a_slow_link_between_nodes_calls_for_hierarchy() -> None:
    layered = costs(8, node_sizes=(4, 4), near=FAST, far=SLOW)
    assert next(iter(shortlist(64 * 2**20, layered))) == "hierarchical"
    assert "hierarchical" not in shortlist(64 * 2**20, costs(8))


@given(num_ranks=st.integers(min_value=2, max_value=300), num_bytes=st.integers(min_value=1, max_value=2**32))
def test_every_estimate_is_above_zero_and_grows_with_the_buffer(num_ranks: int, num_bytes: int) -> None:
    known = costs(num_ranks, node_sizes=(num_ranks - 1, 1), near=FAST, far=SLOW)
    for algorithm in ALGORITHMS.values():
        once, twice = algorithm.estimated_s(num_bytes, known), algorithm.estimated_s(2 * num_bytes, known)
        assert once is not None
        assert twice is not None
        assert 0 < once < twice


@given(num_bytes=st.integers(min_value=1, max_value=2**32))
def test_the_shortlist_is_short_and_deterministic_ones_keep_the_order(num_bytes: int) -> None:
    estimates = shortlist(num_bytes, costs())
    everything = {name for name, one in ALGORITHMS.items() if one.estimated_s(num_bytes, costs()) is not None}
    if num_bytes < 2 * 2**20:
        assert set(estimates) == everything
    else:
        assert 1 <= len(estimates) <= 4
    assert list(estimates.values()) == sorted(estimates.values())
    assert all(ALGORITHMS[name].keeps_rank_order for name in shortlist(num_bytes, costs(), deterministic=True))


def measured() -> MeasuredCosts:
    return measure_costs(dist.group.WORLD)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_costs_are_measured_and_agreed(world: World, backend: str) -> None:
    found = world.run(measured, num_ranks=3, backend=backend)
    assert found[0] == found[1] == found[2]
    assert found[0].num_ranks == 3
    assert found[0].flat.latency_s > 0
    assert found[0].flat.byte_s > 0
    assert found[0].fold_byte_s > 0
    assert found[0].near is None
