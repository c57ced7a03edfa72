"""What a demo is: a model, its data and its loss, ready for `parallelize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A small training job that shows the library at work on a laptop."""

    name: str
    description: str
    model: nn.Module
    loader: DataLoader[Any]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    tokens_per_sample: int = 1
    """Tokens per sample, for tokens/s; 1 where samples are not text."""
    sample: Callable[[nn.Module, torch.device], str] | None = field(default=None)
    """Text to show after training, produced with the trained model on the device that it computes on."""
