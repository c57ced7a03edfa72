"""Gaussian noise that nobody can predict: from the system's secret generator, safe against floating-point attacks.

Why not torch's generator: who knows a part of its output can compute the rest. Why four values in one: the gaps between
floating-point numbers tell something about the value that noise was added to; a sum of four has none that can be used
(Holohan and Braghin, 2021).
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 18
_GRID_BITS = 20


def secure_noise(numel: int, std: float) -> Tensor:
    """`numel` independent values of N(0, std²), in float64."""
    chunks = [_normal_values(min(_CHUNK, numel - start)) for start in range(0, numel, _CHUNK)]
    return torch.from_numpy(np.concatenate([np.empty(0), *chunks])) * std


def noised(values: Tensor, std: float) -> Tensor:
    """`values` with noise, on a grid that does not depend on them: the low digits tell nothing."""
    if std == 0:
        return values.to(torch.float64)
    grid = 2.0 ** (math.floor(math.log2(std)) - _GRID_BITS)
    return torch.round((values.to(torch.float64) + secure_noise(values.numel(), std)) / grid) * grid


def _normal_values(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Each the half of a sum of four normal values (Box and Muller's transform)."""
    uniform = (np.frombuffer(os.urandom(32 * count), dtype=np.uint64) >> np.uint64(11)).astype(np.float64)
    uniform = ((uniform + 0.5) * 2.0**-53).reshape(4, count)
    radius = np.sqrt(-2 * np.log(uniform[:2]))
    angle = 2 * np.pi * uniform[2:]
    four = radius * np.cos(angle), radius * np.sin(angle)
    total: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = (four[0].sum(axis=0) + four[1].sum(axis=0)) / 2
    return total
