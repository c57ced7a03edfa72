"""Lets DTensor run CPU attention split by heads: torch registers the rules for CUDA kernels only.

Dropped once torch has a rule for `_scaled_dot_product_flash_attention_for_cpu` itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_SPLITS = (Replicate(), Shard(0), Shard(1))
"""Attention mixes neither samples (dim 0) nor heads (dim 1)."""


@cache
def register_cpu_attention() -> None:
    """Tell DTensor how the CPU attention kernels may be split: whole, by sample or by head. Once per process."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    @register_sharding(forward)  # type: ignore[untyped-decorator]  # untyped in torch
    def _forward(*_: Any, attn_mask: Any = None, **__: Any) -> list[Any]:
        # Positions: query, key, value, then dropout_p and is_causal where they are passed.
        return [([split] * 2, [split] * 3 + [None] * (len(_) - 3) + _mask(attn_mask)) for split in _SPLITS]

    @register_sharding(backward)  # type: ignore[untyped-decorator]  # untyped in torch
    def _backward(*_: Any, attn_mask: Any = None, **__: Any) -> list[Any]:
        # Positions: grad_out, query, key, value, out, logsumexp, dropout_p, is_causal.
        return [([split] * 3, [split] * 6 + [None] * (len(_) - 6) + _mask(attn_mask)) for split in _SPLITS]


def _mask(mask: Any) -> list[Any]:
    return [] if mask is None else [Replicate()]
