"""A mixture-of-experts layer on one node: moving tokens against bare all-to-alls, routing against one expert."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.parallel.expert.balancing.lending import COPY_ROWS, Lending, worth_lending
from torsh_distributed.parallel.expert.dispatch import ExchangeSizes, RowLayout, collect, dispatch, permute
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.plan.sections.expert import ExpertConfig

_TOKENS, _WIDTH, _HIDDEN = 4096, 512, 2048
_CONFIG = ExpertConfig(num_experts=8, num_experts_per_token=2, overflow="none")

Times = dict[str, list[float]]
"""Seconds of each call, on the slowest rank, by contestant."""


def _time(contestants: dict[str, Callable[[], object]], num_calls: int) -> Times:
    """Contestants take turns; every rank calls this."""
    found: Times = {name: [] for name in contestants}
    for number in range(num_calls + 2):
        for name, call in contestants.items():
            dist.barrier()
            started = time.perf_counter()
            call()
            took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= 2:
                found[name].append(float(took))
    return found


def _time_dispatch(num_calls: int) -> Times:
    """Runs on every rank: tokens to experts and back, without the experts."""
    torch.manual_seed(dist.get_rank())
    group = dist.group.WORLD
    assert group is not None
    tokens = torch.randn(_TOKENS, _WIDTH)
    experts = torch.rand(_TOKENS, _CONFIG.num_experts).topk(2, dim=1).indices.t().contiguous()
    weights = torch.rand(2, _TOKENS)
    send = torch.bincount(experts.flatten() * group.size() // _CONFIG.num_experts, minlength=group.size()).tolist()
    receive = all_to_all_single(torch.tensor(send), group=group).tolist()

    route = ExchangeSizes(send, receive, group)

    def layout_now() -> RowLayout:
        return RowLayout.of(experts.flatten().argsort(stable=True), num_choices=2, num_tokens=_TOKENS)

    def move(inputs: Tensor, layout: RowLayout) -> Tensor:
        return collect(dispatch(inputs, layout, route), weights, layout, route)

    layout = layout_now()
    rows = permute(tokens, layout)

    @torch.no_grad()
    def forward() -> None:
        move(tokens, layout)

    @torch.no_grad()
    def sort_and_move() -> None:
        move(tokens, layout_now())

    def forward_and_backward() -> None:
        move(tokens.detach().requires_grad_(), layout).backward(tokens)

    @torch.no_grad()
    def bare() -> None:
        all_to_all_single(all_to_all_single(rows, send, receive, group=group), receive, send, group=group)

    def bare_twice() -> None:
        bare()
        bare()

    return _time(
        {
            "forward": forward,
            "with sorting": sort_and_move,
            "all-to-alls": bare,
            "with backward": forward_and_backward,
            "all-to-alls twice": bare_twice,
        },
        num_calls,
    )


def _time_routing(num_calls: int) -> Times:
    """Runs on one rank: the gate, its choices and the sorted rows, against one expert on as many tokens."""
    torch.manual_seed(0)
    layer = MoELayer(_WIDTH, _HIDDEN, _CONFIG)
    tokens = torch.randn(_TOKENS, _WIDTH)

    @torch.no_grad()
    def route() -> None:
        decision = layer.router(tokens)
        order = decision.experts.flatten().argsort(stable=True)
        permute(tokens, RowLayout.of(order, num_choices=2, num_tokens=_TOKENS))

    @torch.no_grad()
    def one_expert() -> None:
        hidden = functional.gelu(torch.addmm(layer.experts.up_bias[0], tokens, layer.experts.up[0]))  # type: ignore[index]
        torch.addmm(layer.experts.down_bias[0], hidden, layer.experts.down[0])  # type: ignore[index]

    return _time({"router and permutation": route, "one expert": one_expert}, num_calls)


def _time_hot(num_calls: int) -> Times:
    """Runs on every rank: forward and backward of a layer in which one expert gets half of all rows."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    layer = MoELayer(_WIDTH, _HIDDEN, _CONFIG, group=group)
    with torch.no_grad():
        layer.router.gate.experts.weight[0] += 10 / _WIDTH
    torch.manual_seed(dist.get_rank())
    tokens = (torch.randn(_TOKENS // 8, _WIDTH) + 1).requires_grad_()
    layer(tokens)
    lending = worth_lending(layer.placement, layer.stats().load, most=1, copy_rows=COPY_ROWS["cpu"])
    assert lending is not None, "no expert is hot"

    def step(now: Lending | None) -> None:
        layer.lending = now
        layer(tokens).backward(tokens.detach())
        layer.zero_grad()

    return _time({"lent": lambda: step(lending), "at home": lambda: step(None)}, num_calls)


def _row(name: str, found: list[Times], ours: str, rival: str, rival_name: str) -> Row:
    medians = {who: [statistics.median(one[who]) for one in found] for who in (ours, rival)}
    return Row(
        name=name,
        unit=Unit.SECONDS,
        ours=Measurement.of(medians[ours]),
        rivals={rival_name: Measurement.of(medians[rival])},
    )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    rounds, num_calls = (1, 3) if budget.is_quick else (5, 20)
    world = World()
    try:
        for num_ranks in (2,) if budget.is_quick else (2, 4):
            found = [
                world.run(_time_dispatch, num_calls, num_ranks=num_ranks, backend="shm", timeout_s=300)[0]
                for _ in range(rounds)
            ]
            name = f"dispatch + combine, {num_ranks} ranks"
            yield _row(name, found, "forward", "all-to-alls", "all-to-alls")
            yield _row(f"{name}, sorting", found, "with sorting", "all-to-alls", "all-to-alls")
            yield _row(f"{name}, backward", found, "with backward", "all-to-alls twice", "all-to-alls")
            hot = [
                world.run(_time_hot, min(num_calls, 5), num_ranks=num_ranks, backend="shm", timeout_s=300)[0]
                for _ in range(rounds)
            ]
            yield _row(f"hot expert lent, {num_ranks} ranks", hot, "lent", "at home", "not lent")
        routed = [
            world.run(_time_routing, num_calls, num_ranks=1, backend="gloo", timeout_s=300)[0] for _ in range(rounds)
        ]
        yield _row("router + permutation", routed, "router and permutation", "one expert", "one expert")
    finally:
        world.close()


CASE = Case(
    title="Mixture of experts on one node",
    about=f"""{_TOKENS} tokens of {_WIDTH} float32 per rank, 8 experts, 2 per token, one thread per rank. Dispatch
    puts tokens into rows in the order of experts and sends them; combine returns rows, weights them and sums them. Rows
    marked sorting include finding that order. The rival sends the same rows there and back with bare all-to-alls on the
    same backend; with backward, twice. Routing is the gate, the choice of experts and the sorted rows; its rival is one
    expert of hidden size {_HIDDEN} on the same tokens. Hot expert: {_TOKENS // 8} tokens per rank, which all choose the
    same expert first, forward and backward, with that expert lent to the other ranks; the rival is the same layer
    without lending.""",
    rows=_rows,
)
