"""On CUDA the sparse and linear codecs say what they say on the CPU, and where they can in the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.compress.codecs.checks import gradient, through
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key

pytestmark = pytest.mark.needs_cuda

SAME_BYTES = ["topk:0.01", "topk:0.5", "topk:1", "threshold:0.5", "layerwise:0.05", "randomk:0.1", "bernoulli:0.1"]
ALIKE = ["gaussian", "sketch:50", "powersgd:2"]
SHAPES = {0: [(0,)], 1: [(1,)], 1000: [(30, 20), (400,)], 200_000: [(300, 400), (80_000,)]}


@pytest.mark.parametrize("method", SAME_BYTES + ALIKE)
@pytest.mark.parametrize("numel", SHAPES)
def test_both_devices_say_the_same(method: str, numel: int) -> None:
    here, there = make_codec(method), make_codec(method)
    for codec in (here, there):
        codec.set_shapes(0, SHAPES[numel])
    x = gradient(numel, 1)
    key = Key(seed=1, step=2)
    payload, other = here.encode(x, key), there.encode(x.cuda(), key)
    assert other.is_cuda
    if method in SAME_BYTES:
        assert torch.equal(payload, other.cpu())
    got, others = here.decode(payload, numel, key), there.decode(other, numel, key)
    assert others.is_cuda
    torch.testing.assert_close(got, others.cpu(), rtol=1e-3, atol=1e-4)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """One rank on NCCL."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_averages_what_it_says(group: dist.ProcessGroup) -> None:
    key = Key(seed=1, step=2)
    for method in SAME_BYTES + ALIKE:
        for numel, shapes in SHAPES.items():
            codec, alone = make_codec(method), make_codec(method)
            for each in (codec, alone):
                each.set_shapes(0, shapes)
            x = gradient(numel, 1).cuda()
            averaged = codec.average(x.clone(), group, key)
            assert averaged.mean.is_cuda
            torch.testing.assert_close(averaged.mean, averaged.sent, rtol=1e-5, atol=1e-6)
            if not method.startswith("sketch"):  # whose second round is exact
                torch.testing.assert_close(averaged.sent, through(alone, x, key), rtol=1e-5, atol=1e-6)
