"""The numbers of a training run: the `training` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section


class TrainingConfig(Section):
    """Steps, batch, learning rate. They mean the same at every world size."""

    steps: int = Field(default=1000, ge=1)
    """Optimizer updates in a run."""

    batch_size: int = Field(default=32, ge=1)
    """Samples in one optimizer update, over all ranks and accumulated microbatches together."""

    gradient_accumulation: int = Field(default=1, ge=1)
    """Forward and backward passes per update on each rank. More fit a large batch into little memory."""

    gradient_clipping: float | None = Field(default=None, gt=0)
    """Largest norm of the whole gradient; longer ones are scaled down to it. Left out: no clipping."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the optimizer that the command line builds."""

    lr_scaling: Literal["none", "linear", "square_root", "adaptive"] = "none"
    """How the learning rate grows with the number of replicas: not, in proportion, with the root, or with
    sqrt(batch_size / 32)."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of initial weights and of the order of samples."""

    log_every: int = Field(default=10, ge=1)
    """Steps between two lines of progress."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.gradient_accumulation > self.batch_size:
            yield Problem(
                "gradient_accumulation",
                f"gradient_accumulation {self.gradient_accumulation} is above batch_size {self.batch_size}",
                "a pass needs a sample at least",
            )
        if self.warmup_steps > self.steps:
            yield Problem(
                "warmup_steps",
                f"warmup_steps {self.warmup_steps} is above steps {self.steps}",
                "the learning rate would never reach its value; warm up for fewer steps",
            )
