"""The chosen kernel of attention is tried first; the result does not depend on it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from torsh_distributed.train.speed.attention_kernel import attending_with

KERNELS = ["auto", "flash", "efficient", "cudnn", "math"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_is_the_same_with_every_kernel(kernel: str) -> None:
    query = torch.randn(2, 3, 10, 8, generator=torch.Generator().manual_seed(0))
    expected = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    with attending_with(kernel):
        torch.testing.assert_close(
            functional.scaled_dot_product_attention(query, query, query, is_causal=True), expected
        )


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("kernel", "name"), [("flash", "flash"), ("efficient", "efficient"), ("cudnn", "cudnn")])
def test_on_a_gpu_the_named_kernel_runs(kernel: str, name: str) -> None:
    query = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with attending_with(kernel):
        out = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert name in str(out.grad_fn).lower()
