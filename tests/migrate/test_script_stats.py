"""One class counts what scripts do through Horovod's and FairScale's calls, from the events that they emit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torsh_distributed.migrate.horovod as hvd
from tests.bed.world import World
from torsh_distributed.migrate import ScriptStats
from torsh_distributed.migrate.fairscale import OSS, ShardedDataParallel


def horovod_steps() -> list[dict[str, Any]]:
    """Two steps, sent as they are, as float16 and through a codec."""
    hvd.init()
    found = []
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.codec("topk:0.01", warmup_steps=0)):
        model = nn.Linear(200, 200, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression)
        with ScriptStats() as stats:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 200)).sum().backward()
                optimizer.step()
        model(torch.ones(2, 200)).sum().backward()  # not counted any more
        optimizer.step()
        found.append(stats.to_dict())
    with ScriptStats() as stats:
        calls = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                hvd.allreduce(torch.ones(hvd.rank() + 1), name="differs")

        train(hvd.elastic.ObjectState(epoch=0))
    found.append(stats.to_dict())
    hvd.shutdown()
    return found


def fairscale_steps() -> dict[str, Any]:
    model = nn.Linear(100, 100)
    optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
    sharded = ShardedDataParallel(model, optimizer, reduce_fp16=True)
    with ScriptStats() as stats:
        for _ in range(2):
            sharded(torch.ones(2, 100)).sum().backward()
            optimizer.step()
    return stats.to_dict()


def test_operations_bytes_and_resets_are_counted(world: World) -> None:
    plain, cast, codec, elastic = world.run(horovod_steps, num_ranks=2, backend=None)[0]
    gradient_bytes = 2 * 200 * 200 * 4
    assert (plain["num_buckets"], plain["gradient_bytes"], plain["bytes_per_wire_byte"]) == (2, gradient_bytes, None)
    operations = plain["communication"]["by_op"]
    assert operations["all_reduce"]["num_successes"] >= 2
    assert operations["all_reduce"]["total_s"] > 0
    assert (cast["gradient_bytes"], cast["compressed_bytes"]) == (gradient_bytes, gradient_bytes)
    assert 1.99 < cast["bytes_per_wire_byte"] <= 2.0  # the flags of sparse gradients travel too
    assert codec["bytes_per_wire_byte"] > 10
    assert elastic["changes"] == {"recovered": 1}
    fair = world.run(fairscale_steps, num_ranks=2)[0]
    assert fair["gradient_bytes"] == 2 * (100 * 100 + 100) * 4
    assert fair["bytes_per_wire_byte"] == 2.0
