"""On a GPU: the same losses as without offload, and the allocator's own peak within the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_distributed.parallel.offload import OffloadStats, PagedDataParallel, StateOffload
from torsh_distributed.plan.sections.offload import OffloadConfig

pytestmark = pytest.mark.needs_cuda
MB = 1 / 2**10
"""In GB."""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 512, generator=generator).cuda() for _ in range(20)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        loss = (model(x.to(next(model.parameters()).dtype)).float() - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(dtype: torch.dtype = torch.float32) -> list[float]:
    model, _ = build()
    model = model.cuda().to(dtype)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def paged(*, compute_dtype: torch.dtype | None = None, **changes: Any) -> tuple[list[float], OffloadStats, int]:
    model, optimizer = build()
    plain()  # matrix products take a workspace of their own when they are first used
    base = {"enabled": True, "gpu_memory_budget_gb": 4.5 * MB, "cpu_memory_budget_gb": 64 * MB}
    config = OffloadConfig(**{**base, **changes})
    before = torch.cuda.memory_allocated()
    with PagedDataParallel(model, config, device="cuda", compute_dtype=compute_dtype) as strategy:
        optimizer = strategy.offload_optimizer(optimizer)
        torch.cuda.reset_peak_memory_stats()
        losses = train(model, optimizer)
        peak = torch.cuda.max_memory_allocated() - before
        return losses, strategy.stats(), peak


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpu_memory_budget_gb": 20 * MB, "auto_memory_management": "conservative"},
        {"pin_cpu_memory": False},
        {"cpu_compression": "lossless"},
        {"device_optimizer_ratio": 0.5, "gpu_memory_budget_gb": 24 * MB},
        {"params": False, "gpu_memory_budget_gb": 24 * MB},
        {"grads": False, "gpu_memory_budget_gb": 24 * MB},
    ],
    ids=str,
)
def test_losses_are_those_without_offload_and_memory_is_within_the_budget(changes: dict[str, Any]) -> None:
    losses, stats, peak = paged(**changes)
    assert losses == pytest.approx(plain(), rel=1e-4)
    assert losses[-1] < losses[0]
    assert stats.device.peak_bytes <= stats.device.budget_bytes
    # Beside the budget: batches, activations, and one gradient between its computation and its buffer.
    assert peak <= stats.device.budget_bytes + 20 * 16 * 512 * 4 + 3 * 2**20


def test_the_disk_and_small_forms(tmp_path: Path) -> None:
    losses, stats, _ = paged(disk_dir=str(tmp_path), cpu_memory_budget_gb=8 * MB)
    assert losses == pytest.approx(plain(), rel=1e-4)
    assert stats.disk is not None
    assert stats.disk.peak_bytes > 2**20
    for form, bound in (("fp16", 0.02), ("bf16", 0.05), ("int8", 0.1)):
        losses, _, _ = paged(cpu_compression=form)
        assert losses == pytest.approx(plain(), rel=bound)


def test_bf16_with_precise_master_values_follows_fp32() -> None:
    losses, stats, _ = paged(compute_dtype=torch.bfloat16)
    assert losses == pytest.approx(plain(), rel=0.02)
    assert stats.device_to_host_bytes == 20 * 8 * (512 * 512 + 512) * 2


def test_state_alone_leaves_the_gpu() -> None:
    model, optimizer = build()
    model.cuda()
    config = OffloadConfig(enabled=True, params=False, grads=False, device_optimizer_ratio=0.3)
    with StateOffload(model, optimizer, config) as offload:
        assert train(model, offload.optimizer) == pytest.approx(plain(), rel=1e-4)
