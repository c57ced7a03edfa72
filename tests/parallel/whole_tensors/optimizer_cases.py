"""Optimizers and plans for the table of both, and training with them on ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tests.parallel.reference import BATCH, batches, build
from torsh_distributed.errors import TorshError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.demos.gpt import next_character_loss
from torsh_distributed.train.demos.moe import with_experts

NUM_STEPS = 6
"""The last loss is that after five updates."""

EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "overflow": "none"}

Make = Callable[[list[Tensor]], Optimizer]


class Lars(Optimizer):
    """Written by hand: a rate for each tensor, by the ratio of two norms."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, momentum: float = 0.9, trust: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                ratio = group["trust"] * param.norm() / (param.grad.norm() + 1e-9) if param.norm() > 0 else 1.0
                moved = self.state[param].setdefault("moved", torch.zeros_like(param))
                moved.mul_(group["momentum"]).add_(param.grad * ratio)
                param.add_(moved, alpha=-group["lr"])


class Lamb(Optimizer):
    """Written by hand: Adam's step, scaled for each tensor; its count of steps is a plain number."""

    def __init__(self, params: Iterable[Tensor], lr: float = 5e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
                state["step"] += 1
                state["mean"].mul_(0.9).add_(param.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                mean, square = state["mean"] / (1 - 0.9 ** state["step"]), state["square"] / (1 - 0.99 ** state["step"])
                update = mean / (square.sqrt() + 1e-4) + 0.01 * param
                ratio = param.norm() / update.norm() if param.norm() > 0 and update.norm() > 0 else 1.0
                param.sub_(update * ratio * group["lr"])


class NormalizedSgd(Optimizer):
    """Written by hand: divides by the norm over all parameters."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        held = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.square().sum() for param in held]).sum().sqrt()
        for param in held:
            param.sub_(param.grad / norm * self.param_groups[0]["lr"])


class SignSgd(Optimizer):
    """Written by hand and element-wise; its constructor takes something of its own."""

    def __init__(self, params: Iterable[Tensor], rule: Callable[[Tensor], Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.rule(param.grad), alpha=group["lr"])


def squashed(grad: Tensor) -> Tensor:
    return grad / (grad.abs() + 1e-2)


OPTIMIZERS: dict[str, Make] = {
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5, weight_decay=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.02, weight_decay=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02, eps=1e-5, initial_accumulator_value=0.1),
    "Adam": partial(torch.optim.Adam, lr=3e-3, eps=1e-4),
    "AdamW": partial(torch.optim.AdamW, lr=3e-3, eps=1e-4, weight_decay=0.1),
    "Adamax": partial(torch.optim.Adamax, lr=3e-3, eps=1e-4),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=2),
    "LBFGS": torch.optim.LBFGS,
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2], lr=2e-3),
    "NAdam": partial(torch.optim.NAdam, lr=3e-3, eps=1e-4),
    "RAdam": partial(torch.optim.RAdam, lr=3e-3, eps=1e-4),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=1e-4),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SparseAdam": torch.optim.SparseAdam,
    "Lamb by hand": Lamb,
    "Lars by hand": Lars,
    "NormalizedSgd by hand": NormalizedSgd,
    "SignSgd by hand": lambda params: SignSgd(params, squashed),
}

AXES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": -1}},
    "shard": {"mesh": {"dp": 1, "shard": 2}},
    "zero1": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    "tp": {"mesh": {"dp": 1, "tp": 2}},
    "pp": {"mesh": {"dp": 1, "pp": 2}, "pipeline": {"num_microbatches": 2}},
    "cp": {"mesh": {"dp": 1, "cp": 2}},
    "ep": {"mesh": {"dp": 1, "ep": 2}, "expert": EXPERTS},
    "offload": {"mesh": {"dp": 2}, "offload": {"enabled": True}},
    "dp and shard": {"mesh": {"dp": 2, "shard": 2}},
    "shard and tp": {"mesh": {"dp": 1, "shard": 2, "tp": 2}},
    "tp and pp": {"mesh": {"dp": 1, "tp": 2, "pp": 2}, "pipeline": {"num_microbatches": 2}},
    "shard and pp": {"mesh": {"dp": 1, "shard": 2, "pp": 2}, "pipeline": {"num_microbatches": 2}},
    "shard and ep": {"mesh": {"dp": 1, "shard": 2, "ep": 2}, "expert": EXPERTS},
    "tp and ep": {"mesh": {"dp": 1, "tp": 2, "ep": 2}, "expert": EXPERTS},
}


def model_for(axis: str, optimizer: str) -> nn.Module:
    """The GPT, with experts under ep; for SparseAdam, which takes nothing else, its embedding alone is trained."""
    model: Any = build("gpt")
    if "ep" in axis:
        model = with_experts(model, ExpertConfig(**EXPERTS))
    if optimizer == "SparseAdam":
        model.requires_grad_(False)
        model.token.sparse = True
        model.token.weight.requires_grad_()
    return model


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[name]([param for param in model.parameters() if param.requires_grad])


def train_alone(axis: str, name: str, *, num_steps: int = NUM_STEPS, clip: float | None = None) -> list[float]:
    """Plain torch in one process."""
    model = model_for(axis, name)
    optimizer = make_optimizer(name, model)
    losses = []
    for inputs, targets in batches(num_steps):
        optimizer.zero_grad()
        loss = next_character_loss(model(inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine_for(axis: str, name: str, *, plan: Plan | None = None) -> Engine:
    model = model_for(axis, name)
    chosen = plan or Plan.model_validate({**AXES[axis], "training": {"batch_size": BATCH}})
    return parallelize(model, make_optimizer(name, model), chosen, loss_fn=next_character_loss)


def steps_of(engine: Engine, first: int = 0, last: int = NUM_STEPS) -> list[float]:
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    rows = slice(rank * BATCH // degree, (rank + 1) * BATCH // degree)
    return [engine.step((inputs[rows], targets[rows])) for inputs, targets in batches(last)[first:]]


def train_each(axis: str, names: list[str]) -> dict[str, list[float] | str]:
    """The losses of every optimizer under an axis, or the message by which it is refused."""
    found: dict[str, list[float] | str] = {}
    for name in names:
        try:
            found[name] = steps_of(engine_for(axis, name))
        except TorshError as error:
            found[name] = error.message
    return found
