"""A model with experts, trained through DeepSpeed or through our engine; runs on ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.real_deepspeed import use_deepspeed

WIDTH, NUM_TOKENS, NUM_EXPERTS = 6, 16, 4

GATES: list[dict[str, Any]] = [
    {"k": 1},
    {"k": 1, "use_rts": False, "drop_tokens": False},
    {"k": 1, "noisy_gate_policy": "RSample", "capacity_factor": 1.5},
    {"k": 1, "noisy_gate_policy": "Jitter", "min_capacity": 0},
    {"k": 1, "use_residual": True},
    {"k": 2},
    {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
    {"k": 3, "capacity_factor": 0.8},
    {"k": 3, "drop_tokens": False},
]
"""Arguments of MoE."""


class Expert(nn.Module):
    """Two layers; an expert returns a tensor, or a tuple whose first entry it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return self.down(self.up(rows).relu()), None


class Model(nn.Module):
    """A layer, experts, a head; the loss has the balance of the experts."""

    def __init__(self, moe: type[nn.Module], **given: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.moe = moe(WIDTH, Expert(), NUM_EXPERTS, **given)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, points: Tensor) -> Tensor:
        hidden, balance, _ = self.moe(self.before(points.to(self.before.weight.dtype)).tanh())
        return (self.after(hidden).float() - points).square().mean() + 0.01 * balance


def points(step: int, rank: int) -> Tensor:
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def routed(moe: type[nn.Module], cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    """Outputs, balance and counts of a layer in training and in evaluation, and gradients, from one seed."""
    found = []
    for case in cases:
        layer = Model(moe, **case).moe
        used = (torch.arange(NUM_TOKENS) % 5 != 0).long() if case["k"] == 1 else None
        torch.manual_seed(8)
        out, balance, counts = layer(points(0, 0), used)
        (out.square().sum() + balance).backward()
        grads = {name: param.grad for name, param in layer.named_parameters() if param.grad is not None}
        numbers = {"out": out.detach(), "balance": balance.detach(), "counts": counts, **grads}
        layer.eval()
        with torch.no_grad():
            out, balance, counts = layer(points(1, 0).reshape(2, -1, WIDTH), used)
        found.append({**numbers, "eval out": out, "eval balance": balance, "eval counts": counts})
    return found


def config(stage: int, dtype: str = "fp32", gas: int = 1, clip: float = 0.0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": NUM_TOKENS,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }


def trained(
    deepspeed: Any, moe: type[nn.Module], split: Any, given: Mapping[str, Any], settings: Mapping[str, Any], steps: int
) -> list[float]:
    """This rank's losses."""
    model = Model(moe, **given)
    named = {"params": list(model.parameters()), "name": "all"}
    optimizer = torch.optim.AdamW(split(named), lr=1e-2, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(settings))
    losses = []
    torch.manual_seed(20 + dist.get_rank())
    for number in range(steps * settings["gradient_accumulation_steps"]):
        loss = engine(points(number, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def of_one_process(given: Mapping[str, Any], num_ranks: int, gas: int, steps: int, clip: float) -> list[list[float]]:
    """The losses of every rank's batches when one process trains on all of them."""
    from torsh_distributed.migrate.deepspeed.moe.moe_layer import MoE

    model = Model(MoE, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(step * gas, (step + 1) * gas):
            for rank in range(num_ranks):
                loss = model(points(number, rank))
                (loss / (num_ranks * gas)).backward()
                losses[rank].append(float(loss.detach()))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses


def theirs(gates: Sequence[Mapping[str, Any]], runs: Sequence[tuple[Any, Any]], steps: int) -> Any:
    """The numbers of layers and of trainings through DeepSpeed."""
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    deepspeed = use_deepspeed()
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found]  # installed aside
    from deepspeed.moe.utils import (  # type: ignore[import-not-found]  # installed aside
        split_params_into_different_moe_groups_for_optimizer as split,
    )

    return routed(MoE, gates), [trained(deepspeed, MoE, split, given, settings, steps) for given, settings in runs]


def ours(gates: Sequence[Mapping[str, Any]], runs: Sequence[tuple[Any, Any]], steps: int) -> Any:
    """The same through our engine."""
    from torsh_distributed.migrate import deepspeed
    from torsh_distributed.migrate.deepspeed.moe.moe_layer import (
        MoE,
    )
    from torsh_distributed.migrate.deepspeed.moe.moe_layer import (
        split_params_into_different_moe_groups_for_optimizer as split,
    )

    return routed(MoE, gates), [trained(deepspeed, MoE, split, given, settings, steps) for given, settings in runs]
