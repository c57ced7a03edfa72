"""Which kernel of scaled_dot_product_attention is tried first (`training.attention`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

_ORDER = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attending_with(kernel: str) -> AbstractContextManager[Any]:
    """Around forward: `kernel` is tried first, then the others as far as they apply; `auto` is torch's own order.

    The others are those after it in cudnn, flash, efficient, math: torch's own order on current GPUs, which it does not
    change on demand, so the kernels before the chosen one are turned off.
    """
    if kernel == "auto":
        return nullcontext()
    names = list(_ORDER)
    return sdpa_kernel([_ORDER[name] for name in names[names.index(kernel) :]])
