"""Small models, one process's training of them in plain torch, and the same under offload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torsh_distributed.parallel.offload import OffloadStats, PagedDataParallel
from torsh_distributed.plan.sections.offload import OffloadConfig
from torsh_distributed.train.demos.gpt import CharGPT

STEPS, VOCABULARY = 10, 24
KB = 1 / 2**20
"""In GB: budgets in tests are kilobytes."""


def gpt() -> nn.Module:
    return CharGPT(VOCABULARY, width=16, num_layers=3, num_heads=2)


class Tied(nn.Module):
    """A head tied to the embedding, a frozen layer, an unused parameter, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.layers[2].unused = nn.Parameter(torch.ones(5))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.token(ids)
        for layer in [*self.layers, self.layers[0]]:
            hidden = hidden + torch.tanh(layer(hidden))
        return functional.linear(hidden, self.token.weight)


class Recomputed(nn.Module):
    """Every layer's activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.inner.token(ids) + self.inner.position(torch.arange(ids.shape[1]))
        for block in self.inner.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.inner.head(self.inner.norm(hidden))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "tied": Tied, "recomputed": Recomputed}


def build(name: str = "gpt") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and AdamW with two parameter groups."""
    torch.manual_seed(3)
    model = MODELS[name]()
    small = [param for param in model.parameters() if param.dim() == 1]
    large = [param for param in model.parameters() if param.dim() > 1]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 2e-3, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=4e-3)


def batches(num: int = STEPS, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that count up in steps of one to three from a random start, so there is something to learn."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(num):
        start = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
        stride = torch.randint(1, 4, (size, 1), generator=generator)
        ids = (start + stride * torch.arange(9)) % VOCABULARY
        yield ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


@functools.cache
def plain(name: str = "gpt", *, clip: float | None = None, size: int = 4) -> list[float]:
    """The expected losses, from plain torch."""
    model, optimizer = build(name)
    losses = []
    for ids, targets in batches(size=size):
        optimizer.zero_grad()
        loss = loss_of(model, ids, targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def config(**changes: Any) -> OffloadConfig:
    """A device budget for the GPT's root unit and one layer in use, and host memory for everything."""
    base = {"enabled": True, "gpu_memory_budget_gb": 42 * KB, "cpu_memory_budget_gb": 2000 * KB}
    return OffloadConfig(**{**base, **changes})


def offloaded(
    name: str = "gpt", *, clip: float | None = None, **changes: Any
) -> tuple[list[float], OffloadStats, dict[str, Tensor]]:
    """The same training under offload: losses, statistics and the model's state at the end."""
    model, optimizer = build(name)
    with PagedDataParallel(model, config(**changes)) as paged:
        optimizer = paged.offload_optimizer(optimizer)
        losses = []
        for ids, targets in batches():
            optimizer.zero_grad()
            loss = loss_of(paged.model, ids, targets)
            loss.backward()
            if clip is not None:
                paged.clip_grad_norm(clip)
            optimizer.step()
            losses.append(loss.item())
        return losses, paged.stats(), model.state_dict()
