"""A mixture of experts of transformers, trained by the Engine and by bare loops in pure bf16: for `experts_cuda`."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Budget, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

_BATCH, _LENGTH, _VOCABULARY = 8, 2048, 151936
_TOKENS = _BATCH * _LENGTH
Step = Callable[[], object]


def _model(dtype: torch.dtype) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=_LENGTH,
        use_cache=False,
    )
    with torch.device("cuda"):
        model: nn.Module = Qwen3MoeForCausalLM(config)
    return model.to(dtype)


def _batches() -> Iterator[dict[str, Tensor]]:
    """Every second token follows from the one before, so there is something to learn."""
    ids = torch.randint(_VOCABULARY, (4, _BATCH, _LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, :, 1::2] = (ids[:, :, 0::2] * 7 + 3) % _VOCABULARY
    return itertools.cycle([{"input_ids": one, "labels": one} for one in ids.cuda()])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def _bare(*, is_compiled: bool) -> Step:
    """Parameters, gradients and optimizer state in bf16."""
    model = _model(torch.bfloat16)
    called = torch.compile(model) if is_compiled else model
    optimizer, batches = _optimizer(model), _batches()

    def step() -> Tensor:
        loss: Tensor = called(**next(batches)).loss
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ours(*, is_compiled: bool) -> Step:
    plan = Plan.from_dict(
        {
            "precision": {"dtype": "bf16"},
            "compile": {"enabled": is_compiled},
            "training": {"gradient_clipping": 1.0, "fused_loss": True, "steps": 100_000},
        }
    )
    model = _model(torch.float32)
    engine, batches = parallelize(model, _optimizer(model), plan), _batches()
    return lambda: engine.step(next(batches))


_CONTESTANTS: dict[str, Callable[[], Step]] = {
    "compiled": lambda: _ours(is_compiled=True),
    "bare compiled": lambda: _bare(is_compiled=True),
    "eager": lambda: _ours(is_compiled=False),
    "bare eager": lambda: _bare(is_compiled=False),
}


def _measure(num_rounds: int, num_steps: int) -> dict[str, dict[str, Any]]:
    """Tokens per second in turns and peak bytes of each contestant, all in one process."""
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in _CONTESTANTS.items():
        gc.collect()
        before = torch.cuda.memory_allocated()
        steps[name] = make()
        for _ in range(4):
            steps[name]()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            steps[name]()
        torch.cuda.synchronize()
        found[name] = {"peak_bytes": torch.cuda.max_memory_allocated() - before, "tokens_per_s": []}
    for number in range(num_rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            steps[name]()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(num_steps):
                steps[name]()
            torch.cuda.synchronize()
            found[name]["tokens_per_s"].append(num_steps * _TOKENS / (time.perf_counter() - started))
    return found


def moe_rows(budget: Budget) -> Iterator[Row | Note]:
    """Tokens per second and peak memory beside the bare loop of the same kind."""
    if importlib.util.find_spec("transformers") is None:
        yield Note(text="The Qwen3-MoE was not measured: transformers is not installed.")
        return
    world = World()
    try:
        arguments = (1, 2) if budget.is_quick else (5, 6)
        [found] = world.run(_measure, *arguments, num_ranks=1, backend="nccl", timeout_s=420)
    finally:
        world.close()
    for name in ("compiled", "eager"):
        bare = f"bare {name}"
        yield Row(
            name=f"Qwen3-MoE, {name}: tokens per second",
            unit=Unit.PER_SECOND,
            ours=Measurement.of(found[name]["tokens_per_s"]),
            rivals={f"{bare}, pure bf16": Measurement.of(found[bare]["tokens_per_s"])},
        )
        yield Row(
            name=f"Qwen3-MoE, {name}: peak memory",
            unit=Unit.BYTES,
            ours=Measurement.of([found[name]["peak_bytes"]]),
            rivals={f"{bare}, pure bf16": Measurement.of([found[bare]["peak_bytes"]])},
        )
