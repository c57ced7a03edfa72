"""Server and devices are killed again and again: the weights are those of a run in which nobody was."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bed.world import World
from tests.federated.deployment.test_devices import CONFIG, DeviceTask, serving
from torsh_distributed.federated import DeviceClient, simulate
from torsh_distributed.federated.deployment.device_heartbeat import HeartbeatSettings
from torsh_distributed.federated.deployment.serve import serve_devices
from torsh_distributed.federated.rounds.round_file import RoundFile

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]
NUM_DEVICES = 3
LIMIT_S = 60.0
KILLED = replace(CONFIG, local_epochs=1, max_attempts=1000)
"""Every round needs all devices, so the weights do not depend on who was killed when."""


def started(run: Callable[[], object]) -> int:
    """A process of its own, forked from this one, which has imported everything."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run()
        code = 0
    finally:
        os._exit(code)


def num_rounds(directory: Path) -> int:
    state = RoundFile(directory).read()
    return 0 if state is None else len(state["records"])


def ended(process: int, deadline_s: float) -> int:
    """The status of a process that ends by itself."""
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    raise AssertionError("it did not end")


def train_and_kill(folder: str, num_kills: int) -> tuple[list[int], list[float], list[float]]:
    place = Path(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(place / "server", KILLED, port=port) as first:
        tokens = [first.new_token() for _ in range(NUM_DEVICES)]

    def serve(rounds: int) -> None:
        serve_devices(
            DeviceTask(),
            directory=place / "server",
            config=replace(KILLED, rounds=rounds),
            port=port,
            deadline_s=20.0,
            heartbeat=HeartbeatSettings(beat_s=1.0, expire_s=10.0),
            say=lambda _: None,
        )

    def join(index: int) -> None:
        name = f"d-{index}"
        DeviceClient(
            DeviceTask(),
            ("127.0.0.1", port),
            name=name,
            directory=place / name,
            token=tokens[index],  # a device that was killed while it enrolled shows it again
            give_up_s=LIMIT_S,
        ).run()

    draw = random.Random(0)
    starts: list[Callable[[], object]] = [lambda: serve(10**6), *(lambda i=i: join(i) for i in range(NUM_DEVICES))]
    processes = [started(one) for one in starts]
    try:
        for _ in range(num_kills):
            wanted, deadline_s = num_rounds(place / "server") + 1, time.monotonic() + LIMIT_S
            while num_rounds(place / "server") < wanted:
                assert time.monotonic() < deadline_s, "no round has ended since the last kill"
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.02))
            victim = draw.randrange(len(processes))
            os.kill(processes[victim], signal.SIGKILL)
            os.waitpid(processes[victim], 0)
            processes[victim] = started(starts[victim])
        os.kill(processes[0], signal.SIGKILL)
        os.waitpid(processes[0], 0)
        total = num_rounds(place / "server") + 2
        processes[0] = started(lambda: serve(total))
        deadline_s = time.monotonic() + LIMIT_S
        assert [ended(process, deadline_s) for process in processes] == [0] * len(processes)
        processes = []
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    state = RoundFile(place / "server").read()
    assert state is not None
    plain = DeviceTask()
    simulate(plain, num_clients=NUM_DEVICES, config=replace(KILLED, rounds=total))
    return [record["round"] for record in state["records"]], state["vector"].tolist(), plain.seen[-1].tolist()


def check(world: World, folder: Path, num_kills: int, timeout_s: float = 100.0) -> None:
    (rounds, found, expected), *_ = world.run(train_and_kill, str(folder), num_kills, num_ranks=1, timeout_s=timeout_s)
    assert rounds == list(range(len(rounds)))
    assert len(rounds) > num_kills
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)


def test_no_round_is_lost_or_doubled_when_server_and_devices_are_killed(world: World, tmp_path: Path) -> None:
    check(world, tmp_path, 4)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_no_round_is_lost_or_doubled_by_fifty_kills(world: World, tmp_path: Path) -> None:
    check(world, tmp_path, 50, timeout_s=850.0)
