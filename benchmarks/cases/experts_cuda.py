"""A mixture-of-experts layer on a GPU, forward and backward, against its matrix products alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Budget, Case, Note, Row, compare
from benchmarks.moe_training import moe_rows
from torsh_distributed.parallel.expert.grouped import can_group
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.plan.sections.expert import ExpertConfig

_TOKENS, _EXPERTS, _CHOICES = 16384, 8, 2
_SIZES = ((1024, 4096), (2048, 8192), (4096, 14336))
_CALLS = 10
"""Calls between two waits for the GPU, so the host's work is hidden as in training."""


def _layer_step(layer: MoELayer, tokens: Tensor, grad: Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_CALLS):
            inputs = tokens.detach().requires_grad_()
            (layer(inputs) * 1.0).backward(grad)
            for param in layer.parameters():
                param.grad = None
        torch.cuda.synchronize()

    return run


def _products(layer: MoELayer) -> Callable[[], None]:
    """The six grouped products of a step: two forward, two for the gradients of rows, two for those of weights."""
    up, down = layer.experts.up.detach(), layer.experts.down.detach()
    num_rows = _TOKENS * _CHOICES
    rows = torch.randn(num_rows, up.shape[1], device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(num_rows, up.shape[2], device="cuda", dtype=torch.bfloat16)
    offs = torch.arange(1, _EXPERTS + 1, device="cuda", dtype=torch.int32) * (num_rows // _EXPERTS)
    grouped_mm = functional.grouped_mm

    def run() -> None:
        for _ in range(_CALLS):
            grouped_mm(rows, up, offs=offs)
            grouped_mm(hidden, down, offs=offs)
            grouped_mm(rows, down.transpose(1, 2), offs=offs)
            grouped_mm(hidden.t(), rows, offs=offs)
            grouped_mm(hidden, up.transpose(1, 2), offs=offs)
            grouped_mm(rows.t(), hidden, offs=offs)
        torch.cuda.synchronize()

    return run


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="Not measured here: there is no CUDA device.")
        return
    config = ExpertConfig(num_experts=_EXPERTS, num_experts_per_token=_CHOICES, overflow="none")
    for width, hidden in _SIZES[:1] if budget.is_quick else _SIZES:
        torch.manual_seed(0)
        layer = MoELayer(width, hidden, config, bias=False, device="cuda", dtype=torch.bfloat16)
        tokens = torch.randn(_TOKENS, width, device="cuda", dtype=torch.bfloat16)
        if not can_group(tokens, layer.experts.up):
            yield Note(text="torch has no grouped product for this device: one product per expert is measured.")
        yield compare(
            f"{width} wide, {hidden} hidden",
            _layer_step(layer, tokens, torch.randn_like(tokens)),
            {"matrix products": _products(layer)},
            budget=budget,
            amount=_CALLS,
        )
    yield from moe_rows(budget)


CASE = Case(
    title="Mixture of experts on a GPU",
    about=f"""Forward and backward of a layer with {_EXPERTS} experts, {_CHOICES} for each of {_TOKENS} tokens, bf16, no
    bias, no drops: gate, sorting, experts, weighted sum and all gradients. The rival is the layer's six grouped matrix
    products alone, on rows that are already sorted, the same number for each expert. Then a Qwen3-MoE of transformers
    (12 layers, 1024 wide, 32 experts of 512, 4 for each token) in batches of 8 × 2048 tokens through the Engine, with
    master weights and optimizer state in fp32, against bare loops of a model that is bf16 throughout.""",
    rows=_rows,
)
