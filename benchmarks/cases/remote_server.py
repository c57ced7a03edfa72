"""A parameter server and its workers: steps against DDP, without waiting for a slow worker, rows, and kills."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit, compare
from benchmarks.machine import ROOT
from tests.bed.world import World
from tests.rpc.parameters.test_killed_server import begin, gradients, local
from torsh_distributed import DistributedDataParallel
from torsh_distributed.comm.store.registry import open_store
from torsh_distributed.errors import TorshError
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.parameters import Consistency, ParameterClient, RowTable

_SERVER = "ps"
_NUM_WORKERS = 2
_WIDTH, _NUM_LAYERS, _BATCH = 1024, 8, 64
_SLOWNESS = 3
_DIM, _NUM_ROWS, _NUM_CHOSEN = 64, 10_000_000, 10_000
_KILLED_STEPS = 2000
_BACK_S = 30.0


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A server in a process of its own, that is started again when it is killed; the URL of its store."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"
        serve = f"from torsh_distributed.rpc.parameters import serve; serve({_SERVER!r}, store={url!r})"
        with subprocess.Popen([sys.executable, "-c", serve], cwd=ROOT) as process:
            try:
                yield url
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)))


def _differentiate(model: nn.Module, batch: Tensor) -> float:
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    return loss.item()


def _batch(rank: int) -> Tensor:
    return torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(rank))


def _timed(step: Callable[[], object]) -> float:
    """Seconds until every worker has taken the step."""
    dist.barrier()
    start_s = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start_s


def _steps(url: str, num_steps: int) -> tuple[list[float], list[float], float]:
    """Steps on the server (bsp) and with DDP in turns; and how far the losses are apart."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    batch, ours, theirs = _batch(rank), _model(), _model()
    parallel = DistributedDataParallel(theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    losses: list[tuple[float, float]] = []
    with RpcWorker(f"w{rank}", open_store(url)) as worker, ParameterClient([_SERVER], worker=worker) as client:
        consistency = Consistency(kind="bsp", num_workers=_NUM_WORKERS)
        client.create(dict(ours.named_parameters()), optimizer="SGD", lr=0.01, consistency=consistency)

        def step_on_server() -> None:
            client.pull_into(ours)
            losses.append((_differentiate(ours, batch), 0.0))
            client.push_from(ours)

        def step_with_ddp() -> None:
            losses[-1] = losses[-1][0], _differentiate(parallel, batch)
            optimizer.step()

        times = [(_timed(step_on_server), _timed(step_with_ddp)) for _ in range(num_steps + 2)][2:]
    return [one for one, _ in times], [other for _, other in times], max(abs(a - b) / b for a, b in losses)


def _pushes(url: str, kind: str, seconds: float) -> tuple[int, float]:
    """Pushes of this worker until the time is over, and the seconds that they took; the last worker is slow."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    batch, model = _batch(rank), _model()
    num_passes = _SLOWNESS if rank == _NUM_WORKERS - 1 else 1
    with RpcWorker(f"w{rank}", open_store(url)) as worker, ParameterClient([_SERVER], worker=worker) as client:
        consistency = Consistency(kind="bsp" if kind == "bsp" else "async", num_workers=_NUM_WORKERS)
        client.create(dict(model.named_parameters()), optimizer="SGD", lr=0.001, consistency=consistency)
        dist.barrier()
        num_pushes, start_s = 0, time.perf_counter()
        while (spent_s := time.perf_counter() - start_s) < seconds:
            client.pull_into(model)
            for _ in range(num_passes):
                _differentiate(model, batch)
            client.push_from(model)
            num_pushes += 1
    return num_pushes, spent_s


def _train_exactly(url: str, num_steps: int) -> dict[str, Tensor]:
    """Every update depends on all before it."""
    rank = dist.get_rank()
    with RpcWorker(f"w{rank}", open_store(url)) as worker, ParameterClient([_SERVER], worker=worker) as client:
        consistency = Consistency(kind="bsp", num_workers=_NUM_WORKERS)
        client.create(begin(), optimizer="Adam", consistency=consistency, lr=0.05)
        for step in range(num_steps):
            version = client.push(gradients(rank, step, client.pull()))
            if version != step + 1:
                raise AssertionError(f"push {step + 1} made version {version}")
        return {name: value.clone() for name, value in client.pull().items()}


def _kill(url: str, most: int, ended: threading.Event, back_s: list[float]) -> None:
    """Kill the server at random moments, and note when the next one answers."""
    generator = random.Random(0)
    with RpcWorker("killer", open_store(url)) as worker:
        worker.wait_for([_SERVER], timeout_s=_BACK_S)
        while len(back_s) < most and not ended.wait(generator.uniform(0.01, 0.15)):
            pid = worker.find(_SERVER).pid
            os.kill(pid, signal.SIGKILL)
            start_s = time.perf_counter()
            while worker.find(_SERVER).pid == pid or not _answers(worker):
                if time.perf_counter() - start_s > _BACK_S:
                    raise AssertionError("the server did not come back")
            back_s.append(time.perf_counter() - start_s)


def _answers(worker: RpcWorker) -> bool:
    try:
        worker.ping(_SERVER, timeout_s=1.0)
    except TorshError:
        return False
    return True


def _killed(world: World, budget: Budget) -> Iterator[Row | Note]:
    most = 3 if budget.is_quick else 100
    num_steps = 30 if budget.is_quick else _KILLED_STEPS
    ended, back_s = threading.Event(), list[float]()
    with _server() as url:
        killing = threading.Thread(target=_kill, args=(url, most, ended, back_s))
        killing.start()
        try:
            found = world.run(_train_exactly, url, num_steps, num_ranks=_NUM_WORKERS, backend="gloo", timeout_s=300)
        finally:
            ended.set()
            killing.join()
    expected = local(num_steps, {"lr": 0.05})
    is_equal = all(torch.equal(one[name], value) for one in found for name, value in expected.items())
    yield Row(name="the next server answers after SIGKILL", unit=Unit.SECONDS, ours=Measurement.of(back_s))
    yield Note(
        text=f"{len(back_s)} SIGKILLs at random moments of {num_steps} steps (Adam, bsp, {_NUM_WORKERS} workers): every"
        f" push made the next version, and the parameters are {'bit-equal to' if is_equal else 'NOT those of'} the run"
        f" in one process without kills; the slowest return took {1e3 * max(back_s):.0f} ms"
    )


def _chosen_rows(budget: Budget) -> Iterator[Row]:
    num_rows = 100_000 if budget.is_quick else _NUM_ROWS
    with _server() as url, RpcWorker("w0", open_store(url)) as worker:
        worker.wait_for([_SERVER])
        with ParameterClient([_SERVER], worker=worker) as client:
            tables = {"table": RowTable(num_rows=num_rows, dim=_DIM)}
            client.create(tables, optimizer="SGD", lr=0.1, consistency=Consistency(kind="async"))
            rows = torch.randperm(num_rows)[:_NUM_CHOSEN]
            changes = torch.ones(_NUM_CHOSEN, _DIM)
            copy = torch.empty_like(changes)

            def pull_and_push() -> None:
                client.pull_rows("table", rows)
                client.push({}, {"table": (rows, changes)})

            yield compare(
                f"{_NUM_CHOSEN} rows of {num_rows} x {_DIM} pulled and pushed",
                pull_and_push,
                {"memcpy of them": lambda: copy.copy_(changes)},
                budget=budget,
            )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    world = World()
    try:
        with _server() as url:
            num_steps = 3 if budget.is_quick else 25
            found = world.run(_steps, url, num_steps, num_ranks=_NUM_WORKERS, backend="shm", timeout_s=300)
            ours, theirs, apart = found[0]
            yield Row(
                name="step, 2 workers, bsp, 8.4 M parameters",
                unit=Unit.SECONDS,
                ours=Measurement.of(ours),
                rivals={"our DDP": Measurement.of(theirs)},
            )
            yield Note(
                text=f"Losses of {len(ours)} steps on the server and with DDP: at most {apart:.1e} apart, relatively"
            )
        rates: dict[str, float] = {}
        for kind in ("async", "bsp"):
            with _server() as url:
                seconds = 1.0 if budget.is_quick else 15.0
                told = world.run(_pushes, url, kind, seconds, num_ranks=_NUM_WORKERS, backend="gloo", timeout_s=300)
            rates[kind] = sum(num_pushes / spent_s for num_pushes, spent_s in told)
        yield Row(
            name="pushes of 2 workers, one 3 times slower: async",
            unit=Unit.PER_SECOND,
            ours=Measurement.of([rates["async"]]),
            rivals={"bsp": Measurement.of([rates["bsp"]])},
        )
        yield from _chosen_rows(budget)
        yield from _killed(world, budget)
    finally:
        world.close()


CASE = Case(
    title="Parameter server",
    about="""One server in a process of its own, with two workers that have one thread each; on a machine of two
    processors the three share them. A step pulls the parameters, computes on the worker's batch and pushes the
    gradients (SGD); DDP is ours over shared memory, in turns with it. For the slow worker every batch is
    computed three times. Rows are pulled and pushed by one worker. For the kills a thread ends the server's
    process at random moments and waits until the next one answers.""",
    rows=_rows,
)
