"""Steps, batch and learning rate: the `training` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section


class TrainingConfig(Section):
    """Steps, batch and learning rate. They mean the same at every world size."""

    steps: int = Field(default=1000, ge=1)
    """Optimizer updates in a run."""

    batch_size: int = Field(default=32, ge=1)
    """Samples in one optimizer update, over all ranks and accumulated passes."""

    gradient_accumulation: int = Field(default=1, ge=1)
    """Forward and backward passes per update on each rank. More passes fit a large batch into little memory."""

    gradient_clipping: float | None = Field(default=None, gt=0)
    """Largest norm of the whole gradient; larger gradients are scaled down to it. Left out: no clipping."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the optimizer that the command line builds."""

    lr_scaling: Literal["none", "linear", "square_root", "adaptive"] = "none"
    """How the learning rate grows with the number of replicas: not at all, linearly, with the square root, or by
    sqrt(batch_size / 32)."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the initial weights and of the order of samples."""

    exactly_once: bool = False
    """Promise that an epoch has every sample once, after any restart and at any number of ranks: data that cannot say
    where they are, and orders that cannot be repeated, are refused."""

    loss_is: Literal["auto", "mean", "mean_of_counted", "sum", "global_mean"] = "auto"
    """What the loss of a batch is: a mean over samples, a mean over the labels other than -100, a sum, or a mean that
    the loss computed over all ranks itself (`td.global_mean`). `auto` finds out with the first batch: it watches the
    loss functions of torch, and refuses a loss that is not made of those of its samples. A loss_fn that returns
    `(sum, count)` needs nothing else."""

    gather_for_loss: bool = False
    """Give loss_fn the outputs and targets of all ranks, with gradients to those of this rank: for losses that compare
    samples with each other, such as contrastive ones."""

    sync_batch_norm: bool = False
    """Let BatchNorm layers take their statistics over the batch of all ranks, as one process would."""

    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Kernel of scaled_dot_product_attention that is tried first on a GPU; the others follow where it does not apply.
    `auto` leaves the order to torch."""

    fused_loss: bool = False
    """Compute the model's head and its cross-entropy together, some tokens at a time: the logits of a large vocabulary
    never exist whole. Works with losses that end in torch's cross_entropy, as those of transformers do."""

    log_every: int = Field(default=10, ge=1)
    """Steps between progress lines."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.gradient_accumulation > self.batch_size:
            yield Problem(
                "gradient_accumulation",
                f"training.gradient_accumulation {self.gradient_accumulation} is above training.batch_size"
                f" {self.batch_size}",
                "a pass needs at least one sample",
            )
        if self.warmup_steps > self.steps:
            yield Problem(
                "warmup_steps",
                f"training.warmup_steps {self.warmup_steps} is above training.steps {self.steps}",
                "warm up for fewer steps: the learning rate would never reach its value",
            )
