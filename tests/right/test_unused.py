"""Parameters that the loss does not depend on: every layout trains the others as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.heavy_imports import LLAVA
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

NUM_STEPS, ROWS = 4, 8
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {"mesh": {"dp": 2}}),
    "accumulated": (2, {"mesh": {"dp": 2}, "training": {"gradient_accumulation": 2}}),
    "shard": (2, {"mesh": {"shard": 2}}),
    "zero1": (2, {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "dp × tp": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "dp × pp": (4, {"mesh": {"dp": 2, "pp": 2}, "pipeline": {"num_microbatches": 2}}),
}


class Spare(nn.Module):
    """Has a layer that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.spare = nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.last = nn.Linear(12, 3)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values).tanh()
        return self.last(hidden + self.down(self.up(hidden).relu()))


def decayed(model: Spare, outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets) + 1e-2 * model.first.bias.pow(2).mean()


def made(*, reads: bool) -> tuple[Spare, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = Spare()
    # Decay would move a parameter whose gradient is zeros; one without a gradient stays.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return (
        model,
        optimizer,
        (lambda outputs, targets: decayed(model, outputs, targets)) if reads else functional.mse_loss,
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(ROWS, 6, generator=generator) for _ in range(NUM_STEPS)]
    return [(one, one[:, :3].sin()) for one in values]


def alone(*, reads: bool = False) -> list[float]:
    model, optimizer, loss_fn = made(reads=reads)
    before = model.spare.weight.detach().clone()
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert torch.equal(model.spare.weight, before)
    return losses


def trained(plan: str, reads: bool) -> tuple[list[float], float]:
    """The losses, and how far the unused layer has moved."""
    model, optimizer, loss_fn = made(reads=reads)
    before = model.spare.weight.detach().clone()
    engine = parallelize(model, optimizer, Plan(**PLANS[plan][1]), loss_fn=loss_fn)
    losses = [engine.step(batch) for batch in engine.batches(batches(), epochs=1)]
    moved = [
        (value - before).abs().max().item() for name, value in engine.strategy.whole_tensors() if "spare.w" in name
    ]
    return losses, max(moved, default=0.0)


@pytest.mark.parametrize("plan", PLANS)
def test_a_layer_that_is_not_used_stops_nothing(world: World, plan: str) -> None:
    for losses, moved in world.run(trained, plan, False, num_ranks=PLANS[plan][0], backend="torsh", timeout_s=60):
        assert losses == pytest.approx(alone(), abs=1e-5)
        assert moved == 0


def test_a_loss_that_uses_a_parameter_itself_does_not_lose_its_gradient(world: World) -> None:
    for losses, _ in world.run(trained, "dp", True, num_ranks=2, backend="torsh", timeout_s=60):
        assert losses == pytest.approx(alone(reads=True), abs=1e-5)


def llava() -> nn.Module:
    """A model of images and text of which the last layers of vision are not used."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(3)
    common: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision = CLIPVisionConfig(**common, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(**common, vocab_size=32, max_position_embeddings=32, pad_token_id=0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=31, image_seq_length=4)
    return LlavaForConditionalGeneration(config).train()


def pictures() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    out = []
    for _ in range(3):
        ids = torch.randint(1, 30, (4, 10), generator=generator)
        ids[:, 1:5] = 31
        labels = ids.clone()
        labels[:, :5] = -100
        out.append(
            {
                "input_ids": ids,
                "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
                "attention_mask": torch.ones_like(ids),
                "labels": labels,
            }
        )
    return out


def llava_alone() -> list[float]:
    model = llava()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in pictures():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert any(param.grad is None for param in model.parameters()), "all parameters are used"
    return losses


def llava_everywhere() -> tuple[list[float], dict[str, list[float]]]:
    """The losses of one process, and those of these ranks by plan."""
    losses = {}
    for plan in ("dp", "shard"):
        model = llava()
        engine = parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), Plan(**PLANS[plan][1]))
        losses[plan] = [engine.step(batch) for batch in engine.batches(pictures(), epochs=1)]
    return llava_alone(), losses


@pytest.mark.needs_library("transformers")
def test_a_vision_model_with_layers_that_are_not_used_trains(world: World) -> None:
    for expected, losses in world.run(llava_everywhere, backend="torsh", timeout_s=100, imports=LLAVA):
        assert losses == {plan: pytest.approx(expected, abs=1e-4) for plan in ("dp", "shard")}
