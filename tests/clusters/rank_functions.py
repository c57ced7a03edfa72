"""What ranks on Ray and Dask run in the tests. Imported by workers, so it imports no test library."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Join the world, sum the ranks, tell where this one is."""
    import torch

    import torsh_distributed as td

    found = td.init()
    total = torch.tensor(float(td.rank() + 1))
    td.all_reduce(total)
    return {
        "rank": td.rank(),
        "local_rank": td.local_rank(),
        "world_size": td.world_size(),
        "source": found.source,
        "backend": td.backend(),
        "sum": total.item(),
        "pid": os.getpid(),
        "has_token": "TORSH_JOB_TOKEN" in os.environ,
    }


def try_without_secret() -> str:
    """Connect to the job's store without its secret, as a stranger would."""
    import torsh_distributed as td
    from torsh_distributed.comm.store.registry import open_store

    td.init()
    answer = "let in"
    try:
        open_store(os.environ["TORSH_STORE"], timeout_s=2.0, token="guessed").close()
    except Exception as error:  # whatever it says is the answer
        answer = type(error).__name__
    td.barrier()
    return answer


def fail_on(rank: int) -> None:
    """One rank raises while the others wait for it."""
    import torsh_distributed as td

    td.init()
    if td.rank() == rank:
        raise ValueError("a mistake of the user's")
    td.barrier()


def die_once(marker: str, rank: int) -> int:
    """The first time, this rank is killed while the others wait for it; returns the attempt."""
    import torsh_distributed as td

    td.init()
    if td.rank() == rank and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    td.barrier()
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def wait_forever(marker: str) -> None:
    """Ranks that never end by themselves; each leaves its pid."""
    import torsh_distributed as td

    td.init()
    Path(marker, str(td.rank())).write_text(str(os.getpid()))
    if td.rank() == 0:
        ours, _theirs = socket.socketpair()
        ours.recv(1)
    td.barrier()


def train(
    *,
    steps: int = 8,
    die_at: int | None = None,
    until_size: int | None = None,
    directory: str | None = None,
    marker: str | None = None,
) -> dict[str, Any]:
    """A few steps of a small model. The worker that began as rank 1 is killed at step `die_at`, once.

    With `until_size`, and steps without end, it ends three steps after the world had that size. `marker` is a file
    that appears with the second step.
    """
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import torsh_distributed as td

    td.init()
    torch.manual_seed(0)
    points = torch.randn(240, 8)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    sections: dict[str, Any] = {"training": {"steps": steps, "batch_size": 24}}
    if directory is not None:
        sections["checkpoint"] = {"enabled": True, "dir": directory, "every_steps": 1}
    engine = td.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.05), td.Plan(**sections), loss_fn=nn.functional.mse_loss
    )
    if directory is not None:
        engine.resume()
    first, losses, sizes, num_at_size = engine.num_steps, {}, set(), 0
    member = os.environ.get("TORSH_MEMBER", os.environ["RANK"])
    for batch in engine.batches(DataLoader(data, batch_size=24, shuffle=True)):
        if engine.num_steps == die_at and directory is not None:
            engine.checkpoints.wait()  # steps take a millisecond, and writing is in the background
        is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if engine.num_steps == die_at and member == "1" and is_first_attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        number, size = engine.num_steps, td.world_size()
        losses[number] = engine.step(batch)
        if number == 1 and marker is not None:
            Path(marker).touch()
        sizes.add(size)
        if until_size is not None:
            time.sleep(0.02)  # a step of this model takes a millisecond, and nothing is learned from ten thousand
            num_at_size += size == until_size
            if num_at_size == 3:
                break
    return {"first": first, "losses": losses, "sizes": sorted(sizes), "member": int(member)}
