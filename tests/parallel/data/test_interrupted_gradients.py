"""A rank dies in backward: what the others have of their gradients is theirs still, and its average is exact."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import Tensor, nn

from tests.bed.world import World
from tests.parallel.example_models import backward
from torsh_distributed.comm.backends.shm.core import load_native
from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.errors import TorshError
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.parallel.data.interrupted_gradients import finish_average, keep_gradients
from torsh_distributed.plan import DdpConfig

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(load_native() is None, reason="the core is not compiled: no C compiler was found at install"),
]

WIDTH = 300
BUCKETS = DdpConfig(min_bucket_size_mb=0.3, max_bucket_size_mb=0.5)  # one layer each, in memory that ranks share
VICTIM = 1
DIES_AT = 2
"""Of the layers, counted from the first: those after it are averaged by then."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def gradients(net: nn.Module, rank: int, step: int) -> list[Tensor]:
    """What a rank computes, alone."""
    net.zero_grad()
    backward(loss(net, rank, step))
    return [param.grad.clone() for param in net.parameters() if param.grad is not None]


def loss(net: nn.Module, rank: int, step: int) -> Tensor:
    source = torch.Generator().manual_seed(10 * step + rank)
    found: Tensor = net(torch.randn(8, WIDTH, generator=source)).square().mean()
    return found


def die_between_buckets(ddp: DistributedDataParallel) -> None:
    """Die once the first bucket is averaged, before the next one is sent: in an average it would tear the bucket."""
    while not ddp._gradient_sync._averaged:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank_in_backward() -> tuple[list[int], list[bool]] | None:
    """Which buckets were averaged before the death, on any survivor, and which gradients are right after all."""
    process_group.start_world(
        "shm",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=60.0,
    )
    rank, net = process_group.rank(), model()
    ddp = DistributedDataParallel(net, BUCKETS)
    ddp.keep_failed_gradients()
    for step in range(3):  # buckets are rebuilt and moved to shared memory meanwhile
        ddp.zero_grad()
        backward(loss(ddp, rank, step))
    barrier()
    ddp.zero_grad()
    if rank == VICTIM:
        layer = net[DIES_AT]
        assert isinstance(layer, nn.Linear)
        layer.weight.register_hook(lambda _: die_between_buckets(ddp))
    with pytest.raises(TorshError):
        backward(loss(ddp, rank, 3))
    kept = keep_gradients(ddp)
    abort("a rank died")
    process_group.regroup([0, 2])
    ddp.retire()
    if None in all_gather_object(None if kept is None else 0):
        return None
    assert kept is not None
    averaged = all_gather_object(sorted(kept.outcomes.averaged))
    sources = {bucket: number for number in (1, 0) for bucket in averaged[number]}
    reference = model()
    own = [gradients(reference, other, 3) for other in range(3)]
    other = DistributedDataParallel(net, BUCKETS)
    # What the victim had is computed by the first survivor, in addition.
    for param, grad in zip(net.parameters(), own[VICTIM], strict=True):
        param.grad = grad.clone() * (2 / 3) if rank == 0 else None
    finish_average(other, kept, sources=sources, scale=2 / 3)
    expected = [torch.stack(parts).mean(0) for parts in zip(*own, strict=True)]
    is_right = [
        param.grad is not None and torch.allclose(param.grad, wanted, rtol=1e-4, atol=1e-7)
        for param, wanted in zip(net.parameters(), expected, strict=True)
    ]
    return sorted(sources), is_right


def test_gradients_are_kept_and_averaged_without_the_lost_rank(world: World) -> None:
    outcomes = world.outcomes(lose_a_rank_in_backward, num_ranks=3, backend=None)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.is_ok, outcome.trace
        assert outcome.value is not None, "the average was torn"
        averaged, is_right = outcome.value
        assert averaged, "layers behind the death were averaged before it"
        assert len(averaged) < 5
        assert all(is_right)
