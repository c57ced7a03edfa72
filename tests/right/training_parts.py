"""What small trainings are made of: models as people write them, losses, data, optimizers and schedules, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.reference import Llama
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.train.demos.gpt import CharGPT

VOCABULARY, LENGTH, WIDTH = 29, 16, 16


class Positions(nn.Module):
    """Tokens by themselves: nothing mixes positions."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.middle = middle or nn.Tanh()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        return self.head(hidden + self.down(self.middle(self.up(hidden))))


class Centered(nn.Module):
    """Mixes hidden features by a function, which tensor parallelism must notice."""

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.gelu(hidden - hidden.mean(dim=-1, keepdim=True))


class Shifting(Positions):
    """Mixes positions without attention, which context parallelism must notice."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        return self.head(self.down(self.middle(self.up(hidden + before))))


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).transpose(1, 2)
        return self.head(torch.relu(self.norm(self.convolution(hidden))).transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(ids))[0])


class Routed(nn.Module):
    """Experts, with room for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        config = ExpertConfig(num_experts=4, capacity_factor=8.0)
        self.experts = MoELayer(WIDTH, 2 * WIDTH, config, num_experts_per_token=2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        return self.head(hidden + self.experts(hidden))


class Frozen(CharGPT):
    """A part that is not trained, as with adapters."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, width=WIDTH * 2, num_layers=2)
        self.token.requires_grad_(False)


def _tied() -> nn.Module:
    model = CharGPT(VOCABULARY, width=32, num_layers=2)
    model.head.weight = model.token.weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "positions": Positions,
    "centered": lambda: Positions(Centered()),
    "layer norm inside": lambda: Positions(nn.Sequential(nn.LayerNorm(2 * WIDTH), nn.GELU())),
    "shifting": Shifting,
    "convolving": Convolving,
    "recurrent": Recurrent,
    "gpt": lambda: CharGPT(VOCABULARY, width=32, num_layers=2),
    "tied gpt": _tied,
    "llama": lambda: Llama(num_layers=2),
    "frozen gpt": Frozen,
    "experts": Routed,
}


def _flat(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _selected(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    return functional.cross_entropy(logits[mask], labels[mask]) if mask.any() else 0.0 * logits.sum()


def _sum_and_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def _pooled(logits: Tensor, labels: Tensor) -> Tensor:
    """One label for a sequence, the first."""
    return functional.cross_entropy(logits.mean(dim=1), labels[:, 0].clamp(min=0))


def _regression(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(logits[..., 0], labels.clamp(min=0) / VOCABULARY)


def _mixed(logits: Tensor, labels: Tensor) -> Tensor:
    return _flat(logits, labels) + 0.1 * _regression(logits, labels)


def _hand_written(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of each row's own mean: every sample weighs the same."""
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = (labels != -100).float()
    return (-(picked * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def _masked_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = (labels != -100).float()
    return -(picked * mask).sum() / mask.sum().clamp(min=1)


def _contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    features = functional.normalize(logits.mean(dim=1), dim=-1)
    return functional.cross_entropy(4 * features @ features.T, torch.arange(len(features), device=features.device))


_WEIGHTS = torch.linspace(0.1, 3.0, VOCABULARY)

LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "flat": _flat,
    "weighted": lambda logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels, weight=_WEIGHTS),
    "smoothed": lambda logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1),
    "sum": lambda logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"),
    "selected": _selected,
    "sum and count": _sum_and_count,
    "pooled": _pooled,
    "regression": _regression,
    "mixed": _mixed,
    "hand-written": _hand_written,
    "masked by hand": _masked_by_hand,
    "contrastive": _contrastive,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=2e-3, amsgrad=True, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=2e-3),
}

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "none": None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3),
}


def make_data(padding: str, num_samples: int) -> tuple[Tensor, Tensor]:
    """Tokens, and as labels a function of them; labels of -100 by the name of the padding."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=generator)
    labels = (ids * 3 + 1) % VOCABULARY
    if padding == "ragged":
        ends = torch.randint(1, LENGTH + 1, (num_samples,), generator=generator)
        labels[torch.arange(LENGTH)[None] >= ends[:, None]] = -100
    elif padding == "lonely":  # whole rows without a label, next to full ones
        labels[::2] = -100
        labels[: num_samples // 4] = -100
        labels[3, :2] = 5
    elif padding == "prompts":  # nothing before the answer counts
        starts = torch.randint(0, LENGTH - 1, (num_samples,), generator=generator)
        labels[torch.arange(LENGTH)[None] < starts[:, None]] = -100
    return ids, labels
