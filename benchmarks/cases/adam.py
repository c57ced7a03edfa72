"""An Adam update on host memory: ours against torch's, fused and default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Budget, Case, Note, Row, compare
from torsh_distributed.train import CpuAdam

WIDTH, DEPTH = 1024, 8


def _rows(budget: Budget) -> Iterator[Row | Note]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for name, decay in (("Adam", 0.0), ("AdamW", 0.1)):
                settings: dict[str, Any] = {"weight_decay": decay, "decoupled_weight_decay": decay > 0}
                yield compare(
                    f"{name}, 8.4 M parameters, {num_threads} threads",
                    CpuAdam(model.parameters(), lr=1e-6, **settings).step,
                    {
                        "torch, fused": torch.optim.Adam(model.parameters(), lr=1e-6, fused=True, **settings).step,
                        "torch, default": torch.optim.Adam(model.parameters(), lr=1e-6, **settings).step,
                    },
                    budget=budget,
                )
    finally:
        torch.set_num_threads(before)


CASE = Case(
    title="Adam on host memory",
    about="""One update of 8 × Linear 1024 (8.4 M parameters, fp32), without computing gradients: CpuAdam
    against torch.optim.Adam, fused and with its CPU default.""",
    rows=_rows,
)
