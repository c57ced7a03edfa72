"""The same training through DeepSpeed itself and through our engine, with every loss; runs on ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.real_deepspeed import use_deepspeed

WIDTH, VOCABULARY, LENGTH, MICRO = 24, 32, 6, 4
STEPS = 20


class TinyLanguageModel(nn.Module):
    """Embedding, two blocks with norms, a head: the kinds of layers that 16-bit formats round differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def case(stage: int, dtype: str = "fp32", gas: int = 1, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    """A config; `more` are keys of it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        # Its own linear layer for stage 3 adds the bias after rounding the product; torch's adds it before.
        "zero_optimization": {"stage": stage, **({"memory_efficient_linear": False} if stage == 3 else {})},
        "zero_allow_untested_optimizer": True,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        # DeepSpeed 0.19.8 does not scale the loss without ZeRO, but divides gradients by the scale.
        config["fp16"] = {"enabled": True, **({"loss_scale": 1} if stage == 0 else {"initial_scale_power": 12})}
    return {**config, **more}


def name_of(config: Mapping[str, Any]) -> str:
    dtype = next((name for name in ("bf16", "fp16") if name in config), "fp32")
    gas, clip = config["gradient_accumulation_steps"], config["gradient_clipping"]
    return f"stage {config['zero_optimization']['stage']} {dtype} gas {gas} clip {clip}"


def train(
    deepspeed: Any, config: Mapping[str, Any], num_steps: int = STEPS, *, starts_with_empty_step: bool = False
) -> dict[str, list[float]]:
    """Losses of every microbatch and norms of every update, on this rank."""
    torch.manual_seed(5)
    model = TinyLanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))
    if starts_with_empty_step:
        before = {param: param.detach().clone() for param in engine.module.parameters()}
        for param in before:
            param.grad = torch.zeros_like(param)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        for param, value in before.items():
            param.data.copy_(value)
    data = torch.Generator().manual_seed(11 + dist.get_rank())
    # Unscaled gradients are subnormal in fp16, where dividing before a sum or after it is not the same.
    enlarged = 256.0 if config["zero_optimization"]["stage"] == 0 and "fp16" in config else 1
    losses, norms = [], []
    for _ in range(num_steps * config["gradient_accumulation_steps"]):
        tokens = torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=data)
        loss = engine(tokens)
        engine.backward(loss * enlarged if enlarged != 1 else loss)
        engine.step()
        losses.append(float(loss.detach()))
        if engine.was_step_applied():
            norm = engine.get_global_grad_norm()
            norms.append(float("nan") if norm is None else float(norm))
    return {"losses": losses, "norms": norms}


def theirs(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, list[float]]]:
    """Through DeepSpeed."""
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    deepspeed = use_deepspeed()
    return [train(deepspeed, config) for config in configs]


def ours(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, list[float]]]:
    """Through our engine."""
    from torsh_distributed.migrate import deepspeed

    # Without ZeRO, in 16 bits, DeepSpeed creates the optimizer's state by a step on zero gradients, which Adam counts.
    return [train(deepspeed, config, starts_with_empty_step=_counts_one_more(config)) for config in configs]


def _counts_one_more(config: Mapping[str, Any]) -> bool:
    return config["zero_optimization"]["stage"] == 0 and bool(config.keys() & {"fp16", "bf16"})


SCALES = [
    # (stage, fp16 section): window and powers are small, so that few steps show every rule.
    (0, {"loss_scale_window": 3, "initial_scale_power": 6}),
    (0, {"loss_scale": 64}),
    (1, {"loss_scale_window": 2, "initial_scale_power": 6, "hysteresis": 1}),
    (2, {"loss_scale_window": 3, "initial_scale_power": 6}),
    (2, {"loss_scale_window": 2, "initial_scale_power": 6, "hysteresis": 3, "consecutive_hysteresis": True}),
    (3, {"loss_scale_window": 4, "initial_scale_power": 5, "min_loss_scale": 8}),
    (3, {"loss_scale": 128}),
]
BAD_STEPS = {2, 3, 7, 8, 9, 14}
"""The steps in which the loss of rank 1 is infinite."""


def scales(deepspeed: Any, stage: int, fp16: Mapping[str, Any]) -> list[tuple[float, int, bool]]:
    """After every step: the loss scale, the steps skipped so far, and whether this one was."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    config = {**case(stage, "fp16"), "fp16": {"enabled": True, **fp16}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    found = []
    for step in range(STEPS):
        loss = engine(torch.ones(MICRO, 4, dtype=torch.float16)).float().square().mean()
        engine.backward(loss * float("inf") if step in BAD_STEPS and dist.get_rank() == 1 else loss)
        try:
            engine.step()
        except Exception as error:
            # At the minimum the run ends, in both; DeepSpeed raises a bare Exception.
            if "already at minimum" not in str(error):
                raise
            return [*found, (0.0, step, True)]
        found.append((float(engine.optimizer.loss_scale), engine.skipped_steps, bool(engine.optimizer.overflow)))
    return found


def their_numbers(
    configs: Sequence[Mapping[str, Any]], scalings: Sequence[tuple[int, Mapping[str, Any]]]
) -> tuple[list[dict[str, list[float]]], list[list[tuple[float, int, bool]]]]:
    """Losses and loss scales through DeepSpeed, in one go: its import takes seconds."""
    losses = theirs(configs)
    deepspeed = use_deepspeed()
    return losses, [scales(deepspeed, stage, fp16) for stage, fp16 in scalings]


def our_numbers(
    configs: Sequence[Mapping[str, Any]], scalings: Sequence[tuple[int, Mapping[str, Any]]]
) -> tuple[list[dict[str, list[float]]], list[list[tuple[float, int, bool]]]]:
    """The same through our engine."""
    from torsh_distributed.migrate import deepspeed

    return ours(configs), [scales(deepspeed, stage, fp16) for stage, fp16 in scalings]
