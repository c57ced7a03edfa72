"""What every process of `torsh bench compression` runs: measure each method; rank 0 writes the result."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from torsh_distributed.comm.groups import process_group
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.launch.worker.init import distributed

_ROUNDS = 5
_WIDTH = 1024


@dataclass(frozen=True, kw_only=True)
class MethodTiming:
    """One method on one gradient: medians of several rounds, on the slowest rank."""

    method: str
    num_bytes: int
    """Of the gradient, in fp32."""
    encode_s: float
    decode_s: float
    average_s: float
    """A whole average over all ranks, from call to result."""
    sent_bytes: int
    """What this rank sent for it."""
    relative_error: float
    """Norm of what the message leaves out, relative to the gradient's."""


def time_method(method: str, num_bytes: int) -> MethodTiming:
    """Time a method on gradients like those of linear layers; every rank of the world calls this.

    The gradient is a sum of a few outer products and noise, like the gradient of a batch: pure noise would make
    low-rank and sparse methods look worse than they are.
    """
    group = dist.group.WORLD
    assert group is not None, "the caller initialised the world"
    num_rows = max(1, num_bytes // 4 // _WIDTH)
    generator = torch.Generator().manual_seed(dist.get_rank())
    factors = torch.randn(num_rows, 8, generator=generator) @ torch.randn(8, _WIDTH, generator=generator)
    x = (factors + 0.1 * torch.randn(num_rows, _WIDTH, generator=generator)).flatten()
    codec, key = make_codec(method), Key(rank=dist.get_rank())
    codec.set_shapes(key.stream, [(num_rows, _WIDTH)])
    payload = codec.encode(x, key)
    decoded = codec.decode(payload, x.numel(), key)
    averaged = codec.average(x, group, key)
    return MethodTiming(
        method=method,
        num_bytes=4 * x.numel(),
        encode_s=_slowest_s(lambda: codec.encode(x, key)),
        decode_s=_slowest_s(lambda: codec.decode(payload, x.numel(), key)),
        average_s=_slowest_s(lambda: codec.average(x, group, key)),
        sent_bytes=averaged.num_bytes,
        relative_error=float((x - decoded).norm() / x.norm()),
    )


def _slowest_s(call: Callable[[], object]) -> float:
    """The median of several rounds on the slowest rank; the same number on every rank."""
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    """Time every method on the named backend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--methods", required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with distributed(backend=options.backend):
        timings = [asdict(time_method(method, options.bytes)) for method in options.methods.split(",")]
        if process_group.rank() == 0:
            options.out.write_text(json.dumps(timings))


if __name__ == "__main__":
    main()
