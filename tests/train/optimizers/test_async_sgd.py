"""AsyncSGD on parameter servers: a bound on staleness that is kept, the same parameters at the end, lost workers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.store import open_store
from torsh_distributed.errors import InvalidArgument, OperationTimeout
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.parameters import ParameterServer
from torsh_distributed.train.optimizers import AsyncSGD

Make = Callable[..., AsyncSGD]


@pytest.fixture
def make() -> Iterator[Make]:
    """Workers by name, as threads of this process, of one server."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store("memory://"))
        stack.enter_context(ParameterServer("ps", store=store, lost_after_s=0.1))
        made: list[AsyncSGD] = []

        def one(name: str, params: Any, **options: Any) -> AsyncSGD:
            worker = stack.enter_context(RpcWorker(name, store))
            made.append(AsyncSGD(params, servers=["ps"], worker=worker, **{"timeout_s": 30.0, **options}))
            stack.callback(made[-1]._served.client.close)  # type: ignore[union-attr]
            return made[-1]

        yield one


def target_of(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) * (rank + 1)


def pull(param: Tensor, rank: int) -> None:
    ((param - target_of(rank)).square().sum() / 2).backward()


@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.05, "weight_decay": 0.1})]
)
def test_a_worker_alone_is_torchs_optimizer_with_changing_rates_and_a_resume(
    make: Make, name: str, options: dict[str, Any]
) -> None:
    plain, mine = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
    theirs = getattr(torch.optim, name)([plain], **options)
    ours = make("w", [("x", mine)], optimizer=name, staleness=0, **options)
    for step in range(8):
        for optimizer, param in ((theirs, plain), (ours, mine)):
            optimizer.param_groups[0]["lr"] = options["lr"] / (1 + step)
            optimizer.zero_grad()
            pull(param, 0)
            optimizer.step()
        torch.testing.assert_close(mine.detach(), plain.detach())
        if step == 4:
            state, kept = ours.state_dict(), mine.detach().clone()
            expected = theirs.state_dict()["state"][0]
            for key, value in state["state"][0].items():
                torch.testing.assert_close(value, expected[key])
            for _ in range(2):  # what is undone
                ours.step()
            with torch.no_grad():
                mine.copy_(kept)
            ours.load_state_dict(state)


def unequal(staleness: int) -> tuple[Tensor, int, int]:
    """Rank r makes 20 + 15·r steps: the others go on alone after the shortest has finished."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    points = torch.randn(64, 3)
    truth = torch.tensor([[1.0, -2.0, 0.5]])
    model = nn.Linear(3, 1, bias=False)
    optimizer = AsyncSGD(model.named_parameters(), lr=0.05, staleness=staleness)
    for _ in range(20 + 15 * rank):
        optimizer.zero_grad()
        (model(points) - points @ truth.T).square().mean().backward()
        optimizer.step()
    if rank == dist.get_world_size() - 1:
        [stats] = optimizer.stats().values()
    optimizer.finish()
    is_last = rank == dist.get_world_size() - 1
    return model.weight.detach() - truth, stats.max_lead if is_last else 0, stats.num_pushes if is_last else 0


@pytest.mark.ranks
@pytest.mark.parametrize(("staleness", "backend"), [(0, "gloo"), (3, "shm")])
def test_ranks_of_other_speed_converge_together_within_the_bound(world: World, staleness: int, backend: str) -> None:
    results = world.run(unequal, staleness, num_ranks=3, backend=backend)
    for error, _, _ in results:
        assert error.abs().max() < 0.02
        torch.testing.assert_close(error, results[0][0], rtol=0, atol=0)
    assert results[2][1] <= staleness
    assert results[2][2] >= 50 + 20


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 3), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_the_bound_holds_for_any_speeds(staleness: int, steps: list[int]) -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store("memory://"))
        server = stack.enter_context(ParameterServer("ps", store=store))

        def work(rank: int) -> Tensor:
            param = nn.Parameter(torch.zeros(2))
            optimizer = AsyncSGD(
                [param],
                lr=1.0,
                staleness=staleness,
                servers=["ps"],
                num_workers=len(steps),
                worker=stack.enter_context(RpcWorker(f"w{rank}", store)),
            )
            for _ in range(steps[rank]):
                param.grad = torch.ones(2)
                optimizer.step()
            optimizer.finish()
            return param.detach()

        with ThreadPoolExecutor(len(steps)) as threads:
            found = list(threads.map(work, range(len(steps))))
        stats = server._service.stats()
    assert stats.max_lead <= staleness
    assert stats.max_staleness <= (2 * staleness + 1) * max(1, len(steps) - 1)
    assert stats.num_pushes == sum(steps)
    assert [one.tolist() for one in found] == [[-sum(steps)] * 2] * len(steps)


def test_a_worker_too_far_ahead_waits_until_the_slow_one_has_left(make: Make) -> None:
    first = make("fast", [nn.Parameter(torch.zeros(1))], lr=1.0, staleness=1, num_workers=2, timeout_s=0.5)
    second = make("slow", [nn.Parameter(torch.zeros(1))], lr=1.0, staleness=1, num_workers=2)
    first.param_groups[0]["params"][0].grad = torch.ones(1)
    first.step()
    with pytest.raises(OperationTimeout, match="did not end in time"):
        first.step()
    with pytest.raises(InvalidArgument, match="has not joined"):
        first.step()
    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(second.finish)
        first.rejoin()
        assert first.param_groups[0]["params"][0].item() == -2.0  # the push that nobody was told of is in it once
        first.step()
        first.finish()
        leaving.result(30)
    with pytest.raises(InvalidArgument, match="has finished"):
        first.step()


def test_pushes_and_pulls_are_events_with_their_staleness_and_bytes(make: Make) -> None:
    seen: list[events.ParameterEvent] = []
    first, second = (make(f"w{n}", [nn.Parameter(torch.zeros(100))], staleness=None) for n in range(2))
    for optimizer in (first, second):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(100)
    end = events.subscribe(seen.append, events.ParameterEvent)  # type: ignore[arg-type]
    try:
        first.step()
        second.step()
    finally:
        end()
    assert [(one.operation, one.staleness, one.num_bytes) for one in seen] == [
        ("push", 0, 400),
        ("pull", None, 400),
        ("push", 1, 400),
        ("pull", None, 400),
    ]
    [stats] = first.stats().values()
    assert (stats.mean_staleness, stats.max_staleness) == (0.5, 1)
    assert (stats.received_bytes, stats.sent_bytes) == (800, 4 * 400)


def lose_and_join(url: str) -> tuple[list[float], int]:
    """Rank 0 serves; rank 1 is killed after 3 steps while rank 0 trains on, and rank 2 joins then. No process group."""
    from torsh_distributed import rpc

    rank = int(os.environ["RANK"])
    if rank == 1:
        child = os.fork()
        if child:  # the rank itself lives, and reaps what is killed
            os.waitpid(child, 0)
            return [], 0
    param = nn.Parameter(torch.zeros(6).view(2, 3))
    store = open_store(url)
    server = ParameterServer("ps", store=store, lost_after_s=0.2) if rank == 0 else None
    rpc.start(f"w{rank}", store=url)
    if rank == 2:
        store.wait(["killed"])
    optimizer = AsyncSGD([("x", param)], lr=0.1, staleness=1, servers=["ps"], num_workers=2, timeout_s=50.0)
    for step in range(40):
        if rank == 1 and step == 3:
            store.set("killed", "")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == 6:
            store.wait(["joined"])
        optimizer.zero_grad()
        pull(param, 0)
        optimizer.step()
        if rank == 2 and step == 0:
            store.set("joined", "")
    [stats] = optimizer.stats().values()
    optimizer.finish()
    rpc.shutdown()
    if server is not None:
        server.close()
    return param.detach().flatten().tolist(), stats.num_pushes


@pytest.mark.ranks
def test_a_killed_worker_is_left_behind_and_another_one_joins(world: World, tmp_path: Path) -> None:
    first, _, joined = world.run(lose_and_join, f"file://{tmp_path}/store", num_ranks=3, backend=None)
    assert first[0] == joined[0] == pytest.approx(target_of(0).flatten().tolist(), abs=1e-2)
    assert max(first[1], joined[1]) in (82, 83)  # the third push of the killed one may have been under way


def test_mistakes_are_refused(make: Make) -> None:
    param = nn.Parameter(torch.zeros(1))
    with pytest.raises(InvalidArgument, match="staleness=-1"):
        make("w0", [param], staleness=-1)
    with pytest.raises(InvalidArgument, match="no parameter to train"):
        make("w1", [])
    with pytest.raises(ValueError, match="knows"):
        make("w2", [param], optimizer="NoSuchOptimizer")
    with pytest.raises(InvalidArgument, match="takes and makes no calls yet"):
        AsyncSGD([param])
    optimizer = make("w3", [param])
    with pytest.raises(InvalidArgument, match="one group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
