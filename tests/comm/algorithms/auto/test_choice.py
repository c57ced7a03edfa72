"""`auto`: all ranks choose the same, from numbers they measured and agreed on, and remember it."""

from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.algorithms.quick import quick_choice
from torsh_distributed import events
from torsh_distributed.comm.algorithms.auto import choice
from torsh_distributed.comm.algorithms.auto.measured_costs import measure_costs
from torsh_distributed.comm.algorithms.base import MeasuredCosts
from torsh_distributed.comm.algorithms.registry import ALGORITHMS
from torsh_distributed.comm.collectives.reductions import all_reduce

BACKENDS = ["gloo", "shm"]


def measured() -> MeasuredCosts:
    return measure_costs(dist.group.WORLD)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_links_are_measured_and_agreed(world: World, backend: str) -> None:
    found = world.run(measured, num_ranks=3, backend=backend)
    assert found[0] == found[1] == found[2]
    assert found[0].num_ranks == 3
    assert found[0].flat.latency_s > 0
    assert found[0].flat.byte_s > 0
    assert found[0].fold_byte_s > 0
    assert found[0].near is None


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

    monkeypatch.setattr(choice, "_try_all", timed)
    group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # not in torch's stubs
    known, fastest = choice._race(dict.fromkeys(("ring", "tree", "backend")), 64, group, num_blocks=3)
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
    before = len(choice._choosers) + len(choice._left_to_backend)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return before, len(choice._choosers) + len(choice._left_to_backend)


def test_nothing_is_kept_of_a_group_that_is_gone(world: World) -> None:
    for before, after in world.run(forget, backend="shm"):
        assert before > 0
        assert after == 0


def alone() -> float:
    return all_reduce(torch.tensor(3.0), algorithm="auto").item()


def test_a_world_of_one_has_nothing_to_measure(world: World) -> None:
    assert math.isclose(world.run(alone, num_ranks=1)[0], 3.0)
