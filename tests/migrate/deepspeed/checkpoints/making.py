"""Checkpoints that DeepSpeed itself wrote, with what must be in them: the weights and moments that it held."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.real_deepspeed import use_deepspeed

NUM_STEPS = 3
LR = 0.01


class OddModel(nn.Module):
    """Sizes that divide evenly by nothing, a tied weight, a frozen one and a buffer."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.middle = nn.Linear(7, 5)
        self.back = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("running", torch.arange(3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(self.embedding(tokens)))
        hidden = hidden + self.back(functional.relu(self.middle(hidden)))
        logits: Tensor = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as trainers make them: matrices decay, vectors do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]


def tokens_of(rank: int, step: int) -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def config_of(stage: int, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config


def save_with_deepspeed(directory: str, stage: int, dtype: str = "fp32") -> dict[str, dict[str, Tensor]]:
    """Train on every rank and save under `directory`; what rank 0 sees of the whole state, by name and kind."""
    deepspeed = use_deepspeed()
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    model = OddModel()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config_of(stage, dtype))
    for step in range(NUM_STEPS):
        loss = engine(tokens_of(engine.global_rank, step))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(directory, client_state={"epoch": 4, "note": "from the script"})
    return _whole_state(engine, stage)


def _whole_state(engine: Any, stage: int) -> dict[str, dict[str, Tensor]]:
    utils = importlib.import_module("deepspeed.utils")
    found: dict[str, dict[str, Tensor]] = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        if stage == 0:
            held = engine.optimizer.state[param] if param in getattr(engine.optimizer, "state", {}) else {}
            found[name] = {"weight": param.detach().float().clone()}
            found[name] |= {kind: held[kind].clone() for kind in ("exp_avg", "exp_avg_sq") if kind in held}
            continue
        found[name] = {"weight": utils.safe_get_full_fp32_param(param)}
        for kind in ("exp_avg", "exp_avg_sq"):
            found[name][kind] = utils.safe_get_full_optimizer_state(param, kind)
    return found
