"""A server that is killed again and again: its parameters are, bit by bit, those of training without a kill."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed import rpc
from torsh_distributed.rpc import parameters
from torsh_distributed.rpc.parameters import Consistency, ParameterClient, ParameterServer
from torsh_distributed.rpc.parameters.kept_tensors import KeptTensors
from torsh_distributed.rpc.parameters.parameter_server import supervise

pytestmark = pytest.mark.ranks
SOURCES = str(Path(parameters.__file__).parent)
NUM_WORKERS = 2


def kill_after(num_lines: int) -> None:
    """End this process by SIGKILL when its threads have run so many lines of the server's code: at any point of it."""
    remaining = iter(range(num_lines))

    def on_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and next(remaining, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename.startswith(SOURCES) else None

    threading.settrace(on_call)
    sys.settrace(on_call)


def gradients(worker: int, step: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Depend on the parameters, so an update that is lost or applied twice changes all that follow."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return {
        name: value * 0.1 + torch.randn(value.shape, generator=generator) for name, value in sorted(weights.items())
    }


def begin() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in (("a", (40, 30)), ("b", (7,)))}


def local(num_steps: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """The same in one process, without a server."""
    weights = {name: torch.nn.Parameter(value) for name, value in begin().items()}
    optimizer = torch.optim.Adam(weights.values(), **options)
    for step in range(num_steps):
        plain = {name: value.detach() for name, value in weights.items()}
        pushed = [gradients(worker, step, plain) for worker in range(NUM_WORKERS)]
        for name, param in weights.items():
            total = pushed[0][name] * 1.0
            for other in pushed[1:]:
                total.add_(other[name], alpha=1.0)
            param.grad = total.div_(float(NUM_WORKERS))
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


def start_server(url: str, keep: Path, kills: list[int], marks: Path) -> int:
    """A process that starts servers, each but the last of which is killed after some lines."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:

        def serve() -> None:
            number = len(list(marks.iterdir()))
            (marks / str(number)).touch()
            if number < len(kills):
                kill_after(kills[number])
            with ParameterServer("ps", store=url, keep=keep):
                signal.sigwait({signal.SIGTERM})

        supervise(serve)
        code = 0
    finally:
        os._exit(code)


def train(url: str, folder: str, num_steps: int, kills: list[int]) -> dict[str, Tensor]:
    rank = dist.get_rank()
    keep, marks = Path(folder) / "keep", Path(folder) / "marks"
    supervisor = 0
    if rank == 0:
        marks.mkdir()
        local(1, {"lr": 0.05})  # what torch imports for it takes seconds: before the fork
        supervisor = start_server(url, keep, kills, marks)
    rpc.start(f"w{rank}", store=url)
    with ParameterClient(["ps"], timeout_s=100.0) as client:
        consistency = Consistency(kind="bsp", num_workers=NUM_WORKERS)
        client.create(begin(), optimizer="Adam", consistency=consistency, lr=0.05)
        for step in range(num_steps):
            weights = client.pull()
            assert client.push(gradients(rank, step, weights)) == step + 1
        found = {name: value.clone() for name, value in client.pull().items()}
    dist.barrier()
    rpc.shutdown()
    if supervisor:
        os.kill(supervisor, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) == 0
        assert len(list(marks.iterdir())) == len(kills) + 1, "every server but the last was killed"
        # What the files say, too: every push once.
        members = KeptTensors(keep).values["rounds"]["members"]
        assert {name: member["sequence"] for name, member in members.items()} == {"w0": num_steps, "w1": num_steps}
    return found


def kill_points(num_kills: int) -> Iterator[int]:
    """Lines of code until the kill: a step takes some three hundred."""
    points = random.Random(7)
    return (points.randrange(40, 700) for _ in range(num_kills))


def check(world: World, tmp_path: Path, num_kills: int, num_steps: int) -> None:
    expected = local(num_steps, {"lr": 0.05})
    url = f"file://{tmp_path}/store"
    for found in world.run(train, url, str(tmp_path), num_steps, list(kill_points(num_kills)), num_ranks=NUM_WORKERS):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_a_server_killed_at_several_points_loses_nothing_and_applies_nothing_twice(
    world: World, tmp_path: Path
) -> None:
    check(world, tmp_path, num_kills=6, num_steps=16)


@pytest.mark.matrix
def test_a_server_killed_at_a_hundred_points_loses_nothing_and_applies_nothing_twice(
    world: World, tmp_path: Path
) -> None:
    check(world, tmp_path, num_kills=100, num_steps=250)
