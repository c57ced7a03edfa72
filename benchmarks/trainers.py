"""A Llama of transformers, trained by the Engine, by HF Trainer and by Accelerate: for `speed_cuda`."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Budget, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

_BATCH, _LENGTH, _VOCABULARY = 16, 1024, 32000
Batch = dict[str, Tensor]


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=_LENGTH,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config).cuda()
    return model


def _batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(_VOCABULARY, (8, _BATCH, _LENGTH), generator=generator).cuda()
    return [{"input_ids": one, "labels": one} for one in ids]


class _Clock:
    """Tokens per second between the step `start` and the last, and the peak of memory meanwhile."""

    def __init__(self, start: int, last: int) -> None:
        self._start, self._last = start, last
        self._num_steps = 0
        self._started = 0.0
        self.tokens_per_s = 0.0
        self.peak_bytes = 0

    def tick(self) -> None:
        self._num_steps += 1
        if self._num_steps == self._start:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._started = time.perf_counter()
        elif self._num_steps == self._last:
            torch.cuda.synchronize()
            taken = time.perf_counter() - self._started
            self.tokens_per_s = (self._last - self._start) * _BATCH * _LENGTH / taken
            self.peak_bytes = torch.cuda.max_memory_allocated()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def _by_engine(clock: _Clock, num_steps: int) -> None:
    model = _model()
    plan = Plan.from_dict(
        {
            "precision": {"dtype": "bf16"},
            "compile": {"enabled": True},
            "training": {"gradient_clipping": 1.0, "fused_loss": True, "steps": num_steps + 1},
        }
    )
    engine = parallelize(model, _optimizer(model), plan)
    for _, batch in zip(range(num_steps), itertools.cycle(_batches()), strict=False):
        engine.step(batch)
        clock.tick()


def _by_accelerate(clock: _Clock, num_steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor")
    model = _model()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    for _, batch in zip(range(num_steps), itertools.cycle(_batches()), strict=False):
        with accelerator.autocast():
            loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def _by_trainer(clock: _Clock, num_steps: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticking(TrainerCallback):  # type: ignore[misc]  # untyped in transformers
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    rows = [{"input_ids": row, "labels": row} for batch in _batches() for row in batch["input_ids"].cpu()]
    data = [rows[index % len(rows)] for index in range((num_steps + 2) * _BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=_BATCH,
            max_steps=num_steps,
            bf16=True,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            torch_compile=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model=_model(), args=arguments, train_dataset=data, callbacks=[Ticking()]).train()


_TRAINERS: dict[str, Callable[[_Clock, int], None]] = {
    "torsh": _by_engine,
    "HF Trainer": _by_trainer,
    "Accelerate": _by_accelerate,
}


def _train(name: str, num_steps: int) -> tuple[float, int]:
    clock = _Clock(num_steps // 2, num_steps)
    _TRAINERS[name](clock, num_steps)
    gc.collect()
    return clock.tokens_per_s, clock.peak_bytes


def llama_rows(world: World, budget: Budget) -> Iterator[Row | Note]:
    """Tokens per second and peak memory of each trainer, each in a process of its own and compiled."""
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        yield Note(text=f"The Llama was not trained: {' and '.join(missing)} not installed.")
        return
    num_steps = 8 if budget.is_quick else 40
    found: dict[str, tuple[float, int]] = {}
    for name in _TRAINERS:
        try:
            found[name] = world.run(_train, name, num_steps, num_ranks=1, backend="nccl", timeout_s=200)[0]
        except Exception as error:
            yield Note(text=f"{name} did not run: {type(error).__name__}: {error}"[:500])
    if "torsh" not in found:
        return
    for place, (what, unit) in enumerate((("tokens per second", Unit.PER_SECOND), ("peak memory", Unit.BYTES))):
        measured = {name: Measurement.of([float(one[place])]) for name, one in found.items()}
        yield Row(
            name=f"Llama 0.3 B of transformers, compiled: {what}",
            unit=unit,
            ours=measured.pop("torsh"),
            rivals=measured,
        )
