"""Experts that are lent: who borrows what, how rows are divided, and that nothing but the place of the work changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.bed.world import World
from tests.parallel.expert.test_expert_strategy import STEPS, Job, one_process
from tests.parallel.expert.test_layer import dense, layer_of, ours, tokens_of_all
from torsh_distributed import events
from torsh_distributed.parallel.expert import layer as layer_module
from torsh_distributed.parallel.expert.balancing.lending import COPY_ROWS, Lending, lend, worth_lending
from torsh_distributed.parallel.expert.balancing.placement import Placement
from torsh_distributed.parallel.expert.layer import MoELayer, moe_layers
from torsh_distributed.plan.sections.expert import ExpertConfig

NONE = ExpertConfig(num_experts=4, overflow="none")
DROP = ExpertConfig(num_experts=4, capacity_factor=0.7)
BORROWED: dict[int, tuple[tuple[int, ...], ...]] = {2: ((3,), (0, 1)), 4: ((1, 3), (0,), (), (0, 1))}


# --- who borrows what ---------------------------------------------------------------------------------------------


@st.composite
def lendings(draw: st.DrawFn) -> Lending:
    num_ranks, per_rank = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    num_experts = num_ranks * per_rank
    placement = Placement(tuple(draw(st.permutations(range(num_experts)))), num_ranks)
    lending = Lending(placement, ((),) * num_ranks)
    for rank in range(num_ranks):
        others = sorted(set(range(num_experts)) - set(placement.experts_of(rank)))
        for expert in draw(st.lists(st.sampled_from(others), unique=True, max_size=3)):
            lending = lending.with_copy(expert, rank)
    return lending


@given(data=st.data(), lending=lendings())
def test_every_row_goes_to_one_rank_that_has_its_expert(data: st.DataObject, lending: Lending) -> None:
    num_ranks, num_experts = lending.placement.num_ranks, len(lending.placement.expert_of_slot)
    counts = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    sends = data.draw(st.lists(counts, min_size=num_ranks, max_size=num_ranks))
    divided = lending.divide(sends)
    arriving = [0] * num_ranks
    for source, by_rank in enumerate(divided):
        gone = [0] * num_experts
        for rank, by_place in enumerate(by_rank):
            assert min(by_place) >= 0
            arriving[rank] += sum(by_place)
            for expert, count in zip(lending.experts_on(rank), by_place, strict=True):
                gone[expert] += count
        assert gone == list(sends[source])
        by_slot = [expert for expert in lending.placement.expert_of_slot for _ in range(sends[source][expert])]
        order = lending.reorder(torch.arange(len(by_slot)), by_rank)
        assert sorted(order.tolist()) == list(range(len(by_slot)))
        sent = [expert for rank in range(num_ranks) for expert in lending.experts_on(rank)]
        flat = [count for by_place in by_rank for count in by_place]
        assert [by_slot[row] for row in order] == [
            expert for expert, count in zip(sent, flat, strict=True) for _ in range(count)
        ]
    assert arriving == lending.rank_rows([sum(column) for column in zip(*sends, strict=True)])


def test_rows_fill_up_the_ranks_evenly_and_those_of_a_host_stay_there() -> None:
    """Expert 3 has 60 of 100 rows; with its neighbour its owner has 70."""
    lending = Lending(Placement.contiguous(4, 2), ((3,), ()))
    assert lending.rank_rows([20, 10, 10, 60]) == [50, 50]
    divided = lending.divide([[10, 5, 5, 30], [10, 5, 5, 30]])
    assert divided == [[[10, 5, 20], [5, 10]], [[10, 5, 0], [5, 30]]]
    assert lending.rank_rows([40, 40, 10, 10]) == [80, 20], "a rank that is full already gets none"
    assert Lending(Placement.contiguous(3, 3), ((), (0,), (0,))).rank_rows([11, 0, 1]) == [4, 4, 4]


def test_the_busiest_rank_lends_to_the_idlest_where_that_is_worth_the_copy() -> None:
    placement = Placement.contiguous(8, 4)
    rows = [500, 20, 60, 40, 80, 100, 100, 100]
    one = worth_lending(placement, rows, most=1, copy_rows=0)
    assert one is not None
    assert one.borrowed == ((), (0,), (0,), (0,))
    assert one.rank_rows(rows) == [250, 250, 250, 250]
    dear = worth_lending(placement, rows, most=1, copy_rows=90)
    assert dear is not None
    # The second copy takes 65 rows off the owner (310 to 245), and would cost it 90.
    assert dear.borrowed == ((), (0,), (), ())
    assert dear.rank_rows(rows)[:2] == [310, 310]
    # After the first copy the rank that took it is as busy as the owner, and what it took is to be shared further.
    uneven = [2048, 414, 111, 703, 37, 490, 11, 282]
    shared = worth_lending(placement, uneven, most=1, copy_rows=64)
    assert shared is not None
    assert shared.borrowed == ((), (0,), (0,), (0,))
    assert shared.rank_rows(uneven) == [1024, 1024, 1024, 1024]
    assert worth_lending(placement, rows, most=1, copy_rows=300) is None
    assert worth_lending(placement, rows, most=0, copy_rows=0) is None
    assert worth_lending(placement, [10] * 8, most=2, copy_rows=1) is None


def test_two_hot_ranks_are_both_helped_or_neither() -> None:
    placement = Placement.contiguous(4, 4)
    both = worth_lending(placement, [100, 100, 0, 0], most=1, copy_rows=10)
    assert both is not None
    assert both.rank_rows([100, 100, 0, 0]) == [50, 50, 50, 50]
    # One idle rank is left: whichever it helps, the other stays as busy as it was.
    assert worth_lending(Placement.contiguous(3, 3), [100, 100, 0], most=1, copy_rows=20) is None


# --- what is computed ---------------------------------------------------------------------------------------------


def compare(shares: list[int]) -> list[Any]:
    """Outputs, gradients of tokens and of every parameter, without and with lending."""
    return [[ours(config, shares, borrowed) for borrowed in (None, BORROWED[len(shares)])] for config in (NONE, DROP)]


@pytest.mark.parametrize(
    ("backend", "shares"),
    [("gloo", [9, 14]), ("shm", [13, 10]), ("torsh", [7, 5, 0, 11]), ("shm", [6, 6, 6, 6])],
    ids=str,
)
def test_outputs_and_gradients_are_those_without_lending(world: World, backend: str, shares: list[int]) -> None:
    """Also against a dense mixture: what a copy computed reaches tokens and owner once, in every choice."""
    results = world.run(compare, shares, num_ranks=len(shares), backend=backend, timeout_s=60)
    for number, config in enumerate((NONE, DROP)):
        out, grad_tokens, grads = dense(config, sum(shares))
        torch.testing.assert_close(torch.cat([result[number][1][0] for result in results]), out)
        torch.testing.assert_close(torch.cat([result[number][1][1] for result in results]), grad_tokens)
        for result in results:
            without, lent = result[number]
            for name, grad in grads.items():
                torch.testing.assert_close(lent[2][name], grad, msg=f"{name} of {config}")
                torch.testing.assert_close(lent[2][name], without[2][name], rtol=1e-12, atol=1e-14)


def copies(dtype: torch.dtype) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """What this rank borrows, its own stacks, and their gradients where a copy is used 1 + rank times."""
    group = dist.group.WORLD
    assert group is not None
    layer = layer_of(NONE, group=group)
    own, borrowed = lend(dict(layer.experts.stacked()), Lending(layer.placement, BORROWED[4]), group, dtype)
    used = [*own.values(), *((1 + group.rank()) * stack for stack in borrowed.values())]
    torch.autograd.backward(used, [torch.ones_like(stack) for stack in used])
    params = list(layer.experts.stacked().values())
    return borrowed, [param.detach() for param in params], [torch.as_tensor(param.grad) for param in params]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_copies_are_those_of_the_owner_and_their_gradients_add_up_there(world: World, dtype: torch.dtype) -> None:
    results = world.run(copies, dtype, num_ranks=4, backend="shm")
    for rank, (borrowed, _, grads) in enumerate(results):
        assert list(borrowed) == ["up", "down", "up_bias", "down_bias"]
        for place, expert in enumerate(BORROWED[4][rank]):
            for index, stack in enumerate(borrowed.values()):
                assert torch.equal(stack[place], results[expert][1][index][0].to(dtype))
        expected = 1 + sum(1 + taker for taker, some in enumerate(BORROWED[4]) if rank in some)
        for grad in grads:
            assert torch.equal(grad, torch.full_like(grad, expected))


def by_every_way(is_grouped: bool, dtype: torch.dtype) -> list[list[Tensor]]:
    """Outputs and gradients of tokens and experts, without and with lending, computed in `dtype`."""
    layer_module.can_group = lambda rows, weight: is_grouped
    group = dist.group.WORLD
    layer = MoELayer(8, 16, NONE, group=group)
    found = []
    for borrowed in (None, BORROWED[2]):
        layer.lending = None if borrowed is None else Lending(layer.placement, borrowed)
        layer.zero_grad()
        tokens = torch.randn(30, 8, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = layer(tokens)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        grads = [tokens.grad, *(param.grad for param in layer.experts.parameters())]
        found.append([out.detach().float(), *(torch.as_tensor(grad).clone() for grad in grads)])
    return found


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_grouped_products_and_lower_precision_give_what_they_give_without_lending(
    world: World, is_grouped: bool, dtype: torch.dtype, near: float
) -> None:
    for without, lent in world.run(by_every_way, is_grouped, dtype, backend="shm"):
        for mine, expected in zip(lent, without, strict=True):
            assert float((mine - expected).norm() / expected.norm()) < near


def count_rows() -> tuple[list[int], list[int], int]:
    """Rows computed here without and with a copy of the hot expert, and in evaluation with it."""
    config = ExpertConfig(num_experts=4, num_experts_per_token=1, overflow="none")
    layer = layer_of(config, group=dist.group.WORLD)
    with torch.no_grad():
        layer.router.gate.experts.weight[0] += 3
    found: list[int] = []
    layer.experts.register_forward_pre_hook(lambda _, args: found.append(len(args[0])))
    tokens = tokens_of_all(80).abs()[dist.get_rank() * 40 :][:40]
    seen = []
    for lending, training in ((None, True), (Lending(layer.placement, ((), (0,))), True), (None, False)):
        layer.lending = lending or layer.lending
        layer.train(training)
        found.clear()
        layer(tokens)
        seen.append(sum(found))
    return [seen[0], seen[1]], list(layer.stats().load), seen[2]


def test_the_busiest_rank_computes_as_many_rows_less_as_were_to_be_lent(world: World) -> None:
    results = world.run(count_rows, backend="shm")
    load = results[0][1]
    assert load[0] > 60, "no expert was hot"
    lending = Lending(Placement.contiguous(4, 2), ((), (0,)))
    assert [rows[0] for rows, _, _ in results] == [load[0] + load[1], load[2] + load[3]]
    assert [rows[1] for rows, _, _ in results] == lending.rank_rows(load) == [40, 40]
    assert [rows for _, _, rows in results] == [load[0] + load[1], load[2] + load[3]], "lent in evaluation"


# --- training -----------------------------------------------------------------------------------------------------

HOT = ExpertConfig(num_experts=4, overflow="none", hot_copies=1, rebalance_cooldown_steps=1)
PIECES = HOT.replace(load_balance_loss_coeff=0.0)
MOVING = HOT.replace(num_experts=8, rebalance_threshold=0.05, rebalance_cooldown_steps=3)
CASES = {
    "lent": (HOT, STEPS, 1),
    "drop": (HOT.replace(overflow="drop", capacity_factor=1.6), 4, 1),
    "reroute": (HOT.replace(overflow="reroute", capacity_factor=1.6), 4, 1),
    "microbatches": (PIECES, 4, 2),
    "moving too": (MOVING, 8, 1),
}


def train_case(name: str, ep: int) -> Any:
    """Losses and norms, what was lent, how often experts moved, and the rows computed here in the last step."""
    config, stop, num_pieces = CASES[name]
    seen: list[Any] = []
    ends = [events.subscribe(seen.append, kind) for kind in (events.LendingEvent, events.RebalanceEvent)]
    job = Job(config, ep, hot=True)
    rows: list[int] = []
    for layer in moe_layers(job.strategy.unwrapped).values():
        layer.experts.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    losses, norms = job.train(0, stop - 1, num_pieces=num_pieces)
    rows.clear()
    last = job.train(stop - 1, stop, num_pieces=num_pieces)
    for end in ends:
        end()
    lent = [event for event in seen if isinstance(event, events.LendingEvent)]
    return losses + last[0], norms + last[1], lent, len(seen) - len(lent), sum(rows)


def train_all(eps: list[int]) -> dict[tuple[str, int], Any]:
    COPY_ROWS["cpu"] = 1  # these batches are small: a copy would not be worth it
    return {(name, ep): train_case(name, ep) for ep in eps for name in CASES}


@pytest.mark.parametrize(
    ("num_ranks", "eps", "backend"),
    [
        (2, [2], "shm"),
        pytest.param(4, [2, 4], "torsh", marks=pytest.mark.matrix),
        pytest.param(2, [2], "gloo", marks=pytest.mark.matrix),
    ],
)
def test_losses_and_norms_are_those_of_one_process_with_a_hot_expert_lent(
    world: World, num_ranks: int, eps: list[int], backend: str
) -> None:
    """At 4 ranks, ep 2 is ep 2 × dp 2. Every step decides again what is lent, before the next."""
    results = world.run(train_all, eps, num_ranks=num_ranks, backend=backend, timeout_s=100)
    for (name, ep), _ in results[0].items():
        expected = one_process(CASES[name][0], CASES[name][1], hot=True)
        busiest = max(result[name, ep][4] for result in results)
        evenly = 2 * 8 * 16 * 2 / num_ranks
        for result in results:
            losses, norms, seen, num_moved, _ = result[name, ep]
            assert losses == pytest.approx(expected[0], abs=1e-4), (name, ep)
            assert norms == pytest.approx(expected[1], abs=1e-4), (name, ep)
            assert any(0 in some for event in seen for some in event.borrowed), (name, ep)
            for event in seen:
                assert (event.max_load_after < event.max_load_before) == any(event.borrowed), (name, ep, event)
            assert (num_moved > 0) == (name == "moving too")
        assert busiest <= 1.2 * evenly, (name, ep, busiest, evenly)
