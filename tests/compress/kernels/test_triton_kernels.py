"""On CUDA the codecs write the bytes that they write on the CPU, and read them back to the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.kernels.kernel_choice import kernels_for

pytestmark = pytest.mark.needs_cuda

METHODS = ["int8", "int8:100", "int8:4096", "nbit:4", "sign", "ternary", "ternary:0", "natural", "bimodal"]
SIZES = [1, 7, 1023, 1024, 1280, 5 * 1280 + 3, 300_000]


def samples(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    normal = torch.randn(size, generator=generator)
    spread = normal * torch.exp(8 * torch.randn(size, generator=generator))
    return {
        "normal": normal,
        "many magnitudes": spread,
        "zeros": torch.zeros(size),
        "negative zeros": -torch.zeros(size),
        "constant": torch.full((size,), -3.25),
        "denormal": normal * 1e-40,
        "huge": normal.clamp(-1, 1) * 3e38,
    }


@pytest.mark.parametrize("method", METHODS)
def test_cuda_writes_the_bytes_of_the_cpu_and_reads_them_alike(method: str) -> None:
    codec, key = make_codec(method), Key(seed=3, step=5, stream=1, rank=2)
    for size in SIZES:
        for name, x in samples(size).items():
            here, there = codec.encode(x, key), codec.encode(x.cuda(), key)
            assert torch.equal(here, there.cpu()), f"{method}, {size} elements, {name}: other bytes"
            values = codec.decode(here, size, key), codec.decode(there, size, key).cpu()
            assert torch.equal(*(part.view(torch.int32) for part in values)), f"{method}, {size}, {name}: other values"


@pytest.mark.parametrize("method", METHODS)
def test_decoding_adds_with_a_weight_as_on_the_cpu(method: str) -> None:
    codec, x = make_codec(method), samples(10_001)["normal"]
    assert isinstance(codec, DenseCodec)
    payload = codec.encode(x, Key())
    sums = torch.ones_like(x), torch.ones_like(x).cuda()
    for out in sums:
        assert codec.read(payload.to(out.device), out, weight=0.3, adds=True)
    assert torch.equal(sums[0], sums[1].cpu())


@pytest.mark.parametrize("method", ["int8", "sign", "ternary", "natural"])
def test_damage_is_seen_on_cuda(method: str) -> None:
    codec, x = make_codec(method), samples(10_240)["normal"].cuda()
    assert isinstance(codec, DenseCodec)
    payload = codec.encode(x, Key())
    payload[:4] = 255  # a scale that is not a number, an exponent that no power of two has
    assert not codec.read(payload, torch.empty_like(x))


@pytest.mark.parametrize("size", [4, 400, 4099, 1_000_000])
def test_the_checksum_is_that_of_the_cpu(size: int) -> None:
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert kernels_for(payload).checksum(payload) == kernels_for(payload.cuda()).checksum(payload.cuda())
