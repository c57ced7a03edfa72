"""Counts the floating-point operations of a forward, the fused loss included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def counting_flops() -> FlopCounterMode:
    """A context; `get_total_flops()` of it is the count. Matrix products, convolutions and attention count."""
    return FlopCounterMode(display=False, custom_mapping=_COUNTS)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # untyped in torch


_COUNTS = {
    # torch counts attention on GPUs only.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}
