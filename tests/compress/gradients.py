"""Gradients as hypothesis draws them: of all lengths and kinds, the nasty ones included."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ["normal", "heavy", "sparse", "constant", "zeros", "negative zeros", "huge", "subnormal", "bits"]
PLAIN_KINDS = ["normal", "heavy", "sparse", "constant", "zeros", "spike"]
"""Those for which a relative error is promised: no element is as small as 2**-120."""


def make_gradient(kind: str, numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    uniform = torch.rand(numel, generator=generator)
    match kind:
        case "heavy":
            return x * torch.exp(6 * uniform.square())
        case "sparse":
            return x.where(uniform < 0.05, 0.0)
        case "constant":
            return torch.full((numel,), float(torch.randn(1, generator=generator)))
        case "zeros" | "spike":
            spiked = torch.zeros(numel)
            spiked[numel // 2 : numel // 2 + (kind == "spike")] = -3.7
            return spiked
        case "negative zeros":
            return -torch.zeros(numel)
        case "huge":
            return torch.where(uniform < 0.5, 3.4e38, -3.4e38) * (0.9 + 0.1 * uniform)
        case "subnormal":
            return x * 1e-39
        case "bits":
            bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=generator).to(torch.int32)
            return bits.view(torch.float32).nan_to_num(1.0, 2.0, -3.0)
        case _:
            return x


def gradients(kinds: list[str] = KINDS, *, max_numel: int = 3000) -> st.SearchStrategy[Tensor]:
    """Short ones and those around the ends of blocks more often than others."""
    edges = [numel for block in (8, 256, 512, 1024, 1280, 2048) for numel in (block - 1, block, block + 1)]
    numels = st.one_of(st.integers(0, 20), st.sampled_from(edges), st.integers(0, max_numel))
    return st.builds(make_gradient, st.sampled_from(kinds), numels, st.integers(0, 2**31))
