"""Adasum: adds gradients so that parallel ones count once and orthogonal ones in full.

Of two vectors a and b it is (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b; of more ranks, pairs of pairs. Every rank
gathers all vectors and folds them in the same order, so all get the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adasum(vectors: list[Tensor]) -> Tensor:
    """Fold vectors of one shape; their number is a power of two. Products are taken in float64."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        # Neighbours first, as in recursive doubling: (0, 1), (2, 3), …
        vectors = [_pair(vectors[2 * index], vectors[2 * index + 1]) for index in range(half)]
    return vectors[0]


def _pair(first: Tensor, second: Tensor) -> Tensor:
    a, b = first.double().flatten(), second.double().flatten()
    dot, norm_a, norm_b = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    # A zero vector adds nothing, and the other one then counts in full.
    share_a = torch.where(norm_a > 0, 1 - dot / (2 * norm_a.clamp(min=torch.finfo(torch.float64).tiny)), 1.0)
    share_b = torch.where(norm_b > 0, 1 - dot / (2 * norm_b.clamp(min=torch.finfo(torch.float64).tiny)), 1.0)
    return (share_a * a + share_b * b).to(first.dtype).view_as(first)
