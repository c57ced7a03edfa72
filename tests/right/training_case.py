"""One small training: what is trained, on what, and how it is divided; drawn from a seed, so a number names it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.right.training_parts import LOSSES, MODELS, OPTIMIZERS, SCHEDULES

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "dp 3": (3, {}),
    "dp 4": (4, {}),
    "shard": (2, {"mesh": {"shard": 2}}),
    "shard 3": (3, {"mesh": {"shard": 3}}),
    "zero 1": (2, {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}}),
    "hybrid": (4, {"mesh": {"dp": 2, "shard": 2}, "fsdp": {"strategy": "hybrid_shard"}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "ep": (2, {"mesh": {"ep": 2}}),
    "dp × tp": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "dp × pp": (4, {"mesh": {"dp": 2, "pp": 2}, "pipeline": {"num_microbatches": 2}}),
    "dp × cp": (4, {"mesh": {"dp": 2, "cp": 2}}),
    "dp × ep": (4, {"mesh": {"dp": 2, "ep": 2}}),
    "shard × tp": (4, {"mesh": {"shard": 2, "tp": 2}}),
    "shard × pp": (4, {"mesh": {"shard": 2, "pp": 2}, "pipeline": {"num_microbatches": 2}}),
    "shard × cp": (4, {"mesh": {"shard": 2, "cp": 2}}),
    "tp × pp": (4, {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"num_microbatches": 2}}),
    "tp × cp": (4, {"mesh": {"tp": 2, "cp": 2}}),
    "pp × cp": (4, {"mesh": {"pp": 2, "cp": 2}, "pipeline": {"num_microbatches": 2}}),
}


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """What is trained, and how. The defaults are the plainest; a drawn case changes a few of them."""

    seed: int = 0
    plan: str = "dp"
    model: str = "gpt"
    loss: str = "flat"
    padding: str = "none"
    optimizer: str = "adamw"
    schedule: str = "none"
    precision: str = "fp32"
    accumulation: int = 1
    clipping: float | None = None
    batch_size: int = 8
    num_samples: int = 32
    resume_at: int | None = None
    """The step after which state is loaded into a new engine."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keys of `training`."""

    @property
    def num_ranks(self) -> int:
        """How many ranks the plan is for."""
        return PLANS[self.plan][0]

    def __str__(self) -> str:
        plain = TrainingCase()
        shown = [
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name != "seed" and (name == "plan" or value != getattr(plain, name))
        ]
        return f"seed {self.seed}: {', '.join(shown)}"


def draw_case(seed: int) -> TrainingCase:
    """The training of this number. Plans come in turn, so any hundred numbers have every one."""
    chance = random.Random(seed)
    plan = list(PLANS)[seed % len(PLANS)]
    model = "experts" if "ep" in plan.split() else chance.choice(list(MODELS))
    loss = chance.choice(list(LOSSES))
    options: dict[str, Any] = {}
    if loss == "contrastive" and chance.random() < 0.7:
        options["gather_for_loss"] = True
    if model == "convolving":
        options["sync_batch_norm"] = True
    is_even = "pp" in plan.split()  # microbatches of a pipeline are of equal size
    return TrainingCase(
        seed=seed,
        plan=plan,
        model=model,
        loss=loss,
        padding=chance.choice(["none", "ragged", "lonely", "prompts"]),
        optimizer=chance.choice(list(OPTIMIZERS)),
        schedule=chance.choice(list(SCHEDULES)),
        precision=chance.choice(["fp32", "fp32", "fp32", "bf16"]),
        accumulation=1 if options else chance.choice([1, 1, 2, 3]),
        clipping=chance.choice([None, None, 0.1]),
        batch_size=8 if is_even else chance.choice([8, 8, 12, 7]),
        num_samples=32 if is_even else chance.choice([32, 33, 30]),
        resume_at=chance.choice([None, None, 2]),
        options=options,
    )
