"""The character GPT with experts in place of its feed-forward layers: more parameters, the same work for a token."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torsh_distributed.parallel.expert.layer import MoELayer, auxiliary_loss
from torsh_distributed.plan import TrainingConfig
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.train.demos import gpt
from torsh_distributed.train.demos.base import Demo


def with_experts(model: gpt.CharGPT, config: ExpertConfig) -> gpt.CharGPT:
    """The model with a mixture of experts as the feed-forward layer of each block, in place."""
    for block in model.blocks:
        assert isinstance(block, gpt.Block)
        width = block.projection.out_features
        block.feed_forward = MoELayer(width, 2 * width, config)  # type: ignore[assignment]  # was a Sequential
    return model


def build(training: TrainingConfig, expert: ExpertConfig) -> Demo:
    """The demo with the batch size, learning rate and seed of a plan, and its experts."""
    plain = gpt.build(training)
    assert isinstance(plain.model, gpt.CharGPT)
    model = with_experts(plain.model, expert)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return gpt.next_character_loss(logits, targets) + auxiliary_loss(model)

    return replace(
        plain,
        name="moe",
        description=f"{plain.description}, {expert.num_experts} experts in each of {len(model.blocks)} layers, "
        f"{expert.num_experts_per_token} for each character",
        model=model,
        loss_fn=loss_fn,
        optimizer=torch.optim.AdamW(model.parameters(), lr=training.learning_rate),
    )
