"""The compiled arithmetic, with torch as the judge: half precision by bits, as on machines without instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torsh_distributed.native import SHM_CORE, build, fingerprint

pytestmark = pytest.mark.ranks  # a compiler is started

SOURCES = SHM_CORE.sources

PROBE = """
#define TSH_VERSION 1
#define TSH_HALF_BY_BITS
#include "kernels.c"
void widen(const uint16_t *in, float *out, size_t n) { for (size_t i = 0; i < n; i++) out[i] = load_half(in[i]); }
void narrow(const float *in, uint16_t *out, size_t n) { for (size_t i = 0; i < n; i++) out[i] = store_half(in[i]); }
void widen_bf(const uint16_t *in, float *out, size_t n) { for (size_t i = 0; i < n; i++) out[i] = load_bfloat(in[i]); }
void narrow_bf(const float *in, uint16_t *out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = store_bfloat(in[i]);
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text(PROBE)
    command = [compiler, "-O2", "-fPIC", "-shared", f"-I{SOURCES}", "probe.c", "-o", "probe.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "probe.so"))


def convert(function: object, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(source.numel(), dtype=dtype)
    function(  # type: ignore[operator]  # a function of the library
        ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(source.numel())
    )
    return out


def interesting_floats() -> torch.Tensor:
    """Random bit patterns, and everything around the edges where rounding, subnormals and infinity begin."""
    generator = torch.Generator().manual_seed(1)
    random_bits = torch.randint(-(2**31), 2**31 - 1, (300_000,), generator=generator, dtype=torch.int64)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    edges = torch.cat([torch.nextafter(halves, torch.tensor(sign * torch.inf)) for sign in (1, -1)])
    middles = (halves[1:] + halves[:-1]) / 2
    return torch.cat([random_bits.to(torch.int32).view(torch.float32), halves, edges, middles])


def assert_same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, except that any NaN is as good as another."""
    assert torch.equal(actual.isnan(), expected.isnan())
    same = (actual == expected) & (actual.signbit() == expected.signbit())
    assert bool((same | expected.isnan()).all())


def test_every_half_widens_as_torch_widens_it(probe: ctypes.CDLL) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    assert_same_values(convert(probe.widen, bits, torch.float32), bits.view(torch.float16).float())
    assert_same_values(convert(probe.widen_bf, bits, torch.float32), bits.view(torch.bfloat16).float())


def test_floats_round_to_half_as_torch_rounds_them(probe: ctypes.CDLL) -> None:
    floats = interesting_floats()
    assert_same_values(convert(probe.narrow, floats, torch.float16), floats.half())
    assert_same_values(convert(probe.narrow_bf, floats, torch.bfloat16), floats.bfloat16())


@pytest.mark.slow
@pytest.mark.matrix
def test_the_core_is_rebuilt_when_its_sources_change(tmp_path: Path) -> None:
    for path in SOURCES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = fingerprint(tmp_path)
    assert before == fingerprint(SOURCES)
    (tmp_path / "layout.c").write_text((tmp_path / "layout.c").read_text() + "\n#error no\n")
    assert fingerprint(tmp_path) != before
    assert "the compiler failed" in build(tmp_path, tmp_path / "core.so")
    assert not (tmp_path / "core.so").exists()
