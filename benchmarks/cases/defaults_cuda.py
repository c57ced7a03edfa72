"""What a plan gives by its defaults, and with `[compile]` alone, on a GPU: against the loops one would write."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.speed_cuda import SMALL
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

Batch = Mapping[str, Tensor]
Step = Callable[[], object]


@dataclass(frozen=True)
class _Subject:
    """A model, and the batches that it is trained with."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    num_items: int
    """Tokens of a batch, or images."""


def _text(num_rows: int, length: int, vocabulary: int, **names: str) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(vocabulary, (num_rows, length), generator=generator)
        return {names.get("inputs", "input_ids"): ids, names.get("labels", "labels"): ids}

    return batch


def _images(num_rows: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        images = torch.randn(num_rows, 3, 224, 224, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(1000, (num_rows,), generator=generator)}

    return batch


def _of_transformers(model_class: str, config_class: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**settings)
        with torch.device("cuda"):
            model: nn.Module = getattr(transformers, model_class)(config)
        return model.train()

    return build


_DECODER = {"max_position_embeddings": 2048, "use_cache": False, "tie_word_embeddings": True}
_QWEN = _of_transformers(
    "Qwen3ForCausalLM",
    "Qwen3Config",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    **_DECODER,
)
_LLAMA = _of_transformers(
    "LlamaForCausalLM",
    "LlamaConfig",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    **_DECODER,
)
_VIT = _of_transformers("ViTForImageClassification", "ViTConfig", image_size=224, patch_size=16, num_labels=1000)

_SUBJECTS = {
    "GPT 124 M": _Subject(SMALL.model, _text(32, 1024, 50304, inputs="ids", labels="targets"), 32 * 1024),
    "Qwen3-0.6B": _Subject(_QWEN, _text(8, 2048, 151936), 8 * 2048),
    "Llama 1 B": _Subject(_LLAMA, _text(8, 2048, 128256), 8 * 2048),
    "ViT-B/16": _Subject(_VIT, _images(128), 128),
}
_PLANS: dict[str, dict[str, Any]] = {"defaults": {}, "compile": {"compile": {"enabled": True}}}


def _batches(subject: _Subject) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [subject.batch(generator) for _ in range(4)]
    return itertools.cycle([{name: value.cuda() for name, value in one.items()} for one in made])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def _loss(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def _bare(subject: _Subject, *, is_compiled: bool) -> Step:
    """A loop that does not read the loss, so nothing waits for the GPU."""
    model = subject.build()
    called = torch.compile(model) if is_compiled else model
    optimizer, batches = _optimizer(model), _batches(subject)

    def step() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = _loss(called(**next(batches)))
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ours(subject: _Subject, changes: Mapping[str, Any]) -> Step:
    values = {"precision": {"dtype": "bf16"}, "training": {"gradient_clipping": 1.0, "steps": 100_000}, **changes}
    model = subject.build()
    engine, batches = parallelize(model, _optimizer(model), Plan.from_dict(values)), _batches(subject)
    return lambda: engine.step(next(batches))


def _measure(name: str, num_rounds: int, num_steps: int) -> dict[str, dict[str, Any]]:
    """Items per second in turns and peak bytes of each contestant, all in one process."""
    subject = _SUBJECTS[name]
    makers: dict[str, Callable[[], Step]] = {
        "bare eager": lambda: _bare(subject, is_compiled=False),
        "bare compiled": lambda: _bare(subject, is_compiled=True),
        **{key: lambda plan=plan: _ours(subject, plan) for key, plan in _PLANS.items()},  # type: ignore[misc]
    }
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for key, make in makers.items():
        gc.collect()
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        steps[key] = make()
        for _ in range(4):
            steps[key]()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            steps[key]()
        torch.cuda.synchronize()
        found[key] = {"peak_bytes": torch.cuda.max_memory_allocated() - before, "per_s": []}
        print(name, key, found[key]["peak_bytes"] / 2**30, f"{time.perf_counter() - started:.0f} s", flush=True)
    for number in range(num_rounds):
        for key in sorted(steps, reverse=bool(number % 2)):
            steps[key]()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(num_steps):
                steps[key]()
            torch.cuda.synchronize()
            found[key]["per_s"].append(num_steps * subject.num_items / (time.perf_counter() - started))
    return found


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available() or importlib.util.find_spec("transformers") is None:
        yield Note(text="Not measured here: this needs a CUDA device and transformers.")
        return
    arguments = (1, 2) if budget.is_quick else (5, 6)
    for name in filter(budget.wants, _SUBJECTS):
        world = World()
        try:
            [found] = world.run(_measure, name, *arguments, num_ranks=1, backend="nccl", timeout_s=300)
        finally:
            world.close()
        for plan, rival in zip(_PLANS, ("bare eager", "bare compiled"), strict=True):
            yield Row(
                name=f"{name}, {plan}: {'images' if name.startswith('ViT') else 'tokens'} per second",
                unit=Unit.PER_SECOND,
                ours=Measurement.of(found[plan]["per_s"]),
                rivals={rival: Measurement.of(found[rival]["per_s"])},
            )
            yield Row(
                name=f"{name}, {plan}: peak memory",
                unit=Unit.BYTES,
                ours=Measurement.of([found[plan]["peak_bytes"]]),
                rivals={rival: Measurement.of([found[rival]["peak_bytes"]])},
            )


CASE = Case(
    title="Defaults on a GPU",
    about="""GPT of 124 M parameters (32 × 1024 tokens), Qwen3-0.6B and a Llama of 1.2 B of transformers (8 × 2048) and
    ViT-B/16 (128 images), in bf16, with fused AdamW and clipping. "defaults" is a plan that says `precision = "bf16"`
    and no more, beside a bare eager loop with autocast; "compile" adds `[compile]`, beside `torch.compile(model)`.""",
    rows=_rows,
)
