"""Compile and the fused loss on a GPU: the Engine against a bare torch loop, and against other trainers."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from benchmarks.trainers import llama_rows
from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

_VOCABULARY = 50304
_PEAK_FLOPS = 989e12
Step = Callable[[], object]


class _Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = hidden + self.down(functional.gelu(self.up(self.feed_forward_norm(hidden)), approximate="tanh"))
        return out


class _Gpt(nn.Module):
    """A GPT with a tied head that returns its loss, as people write it."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(_Layer(size.width, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, _VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    @override
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


@dataclass(frozen=True)
class GptSize:
    """A GPT, and the batches that it is trained with."""

    name: str
    width: int
    num_layers: int
    num_heads: int
    batch_size: int
    length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one step."""
        return self.batch_size * self.length

    def flops_per_token(self, num_params: int) -> float:
        """What the products and attention of a token take, forward and backward."""
        return 6.0 * num_params + 12.0 * self.num_layers * self.width * self.length

    def model(self) -> _Gpt:
        """The model on the GPU, the same at every call."""
        torch.manual_seed(0)
        with torch.device("cuda"):
            return _Gpt(self)

    def batches(self, num_batches: int) -> list[tuple[Tensor, Tensor]]:
        """Text that can be learned: each id is drawn near the one before, by a rule with some noise."""
        generator = torch.Generator("cuda").manual_seed(1)
        shape = (num_batches, self.batch_size, self.length + 1)
        steps = torch.randint(1, 17, shape, generator=generator, device="cuda")
        ids = (steps.cumsum(-1) * 37) % _VOCABULARY
        return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]


SMALL = GptSize("GPT 124 M", 768, 12, 12, 32, 1024)
LARGE = GptSize("GPT 0.9 B", 2048, 16, 16, 8, 2048)

LAYERS = {"compile": {"enabled": True}, "training": {"fused_loss": True}}
_PLANS: dict[str, dict[str, Any]] = {
    "compiled as one": {"compile": {"enabled": True, "scope": "model"}},
    "layers, fused loss": LAYERS,
    "CUDA graphs": {"compile": {"enabled": True, "scope": "model", "cuda_graphs": True}},
}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)


def _bare(size: GptSize, *, is_compiled: bool) -> Step:
    """The loop one would write: it does not read the loss, so nothing waits for the GPU."""
    model = size.model()
    called = torch.compile(model) if is_compiled else model
    optimizer = _optimizer(model)
    batches = itertools.cycle(size.batches(8))

    def step() -> Tensor:
        ids, targets = next(batches)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss: Tensor = called(ids, targets)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def engine_step(size: GptSize, changes: Mapping[str, Mapping[str, Any]]) -> Step:
    """A step through the Engine in bf16 with clipping, and what `changes` says."""
    sections: dict[str, dict[str, Any]] = {
        "precision": {"dtype": "bf16"},
        "training": {"gradient_clipping": 1.0, "steps": 100_000},
    }
    merged = {name: {**sections.get(name, {}), **changes.get(name, {})} for name in {*sections, *changes}}
    model = size.model()
    engine = parallelize(model, _optimizer(model), Plan.from_dict(merged))
    batches = itertools.cycle(size.batches(8))
    return lambda: engine.step(next(batches))


def _measure(size: GptSize, names: list[str], num_rounds: int, num_steps: int) -> dict[str, dict[str, Any]]:
    """Tokens per second in turns and peak bytes of each contestant, all in one process."""
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        gc.collect()
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        try:
            step = _bare(size, is_compiled=name == "bare compiled") if name.startswith("bare") else None
            step = step or engine_step(size, _PLANS[name])
            for _ in range(4):
                step()
            torch.cuda.synchronize()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
            continue
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        steps[name] = step
        found[name] = {"peak_bytes": peak, "warm_up_s": time.perf_counter() - started, "tokens_per_s": []}
        print(size.name, name, found[name], flush=True)
    for number in range(num_rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            steps[name]()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(num_steps):
                steps[name]()
            torch.cuda.synchronize()
            found[name]["tokens_per_s"].append(num_steps * size.num_tokens / (time.perf_counter() - started))
    for name in steps:
        print(size.name, name, found[name], flush=True)
    return found


def _rows_of(size: GptSize, found: Mapping[str, Mapping[str, Any]], names: list[str]) -> Iterator[Row | Note]:
    for name, result in found.items():
        if "error" in result:
            yield Note(text=f"{size.name}, {name} did not run: {result['error']}")
    bare = [name for name in ("bare eager", "bare compiled") if "tokens_per_s" in found.get(name, {})]
    for name in names:
        if name in bare or "tokens_per_s" not in found.get(name, {}):
            continue
        speeds = {one: Measurement.of(found[one]["tokens_per_s"]) for one in [name, *bare]}
        yield Row(
            name=f"{size.name}, {name}: tokens per second",
            unit=Unit.PER_SECOND,
            ours=speeds[name],
            rivals={one: speeds[one] for one in bare},
        )
        if name == "CUDA graphs":  # the memory of a recording is not seen as allocated
            continue
        peaks = {one: Measurement.of([found[one]["peak_bytes"]]) for one in [name, *bare]}
        yield Row(
            name=f"{size.name}, {name}: peak memory",
            unit=Unit.BYTES,
            ours=peaks[name],
            rivals={one: peaks[one] for one in bare},
        )
    num_params = sum(param.numel() for param in size.model().parameters())
    shares = ", ".join(
        f"{name} {size.flops_per_token(num_params) * Measurement.of(one['tokens_per_s']).median / _PEAK_FLOPS:.1%}"
        for name, one in found.items()
        if "tokens_per_s" in one
    )
    yield Note(text=f"MFU of {size.name} ({num_params / 1e6:.0f} M parameters, of 989 TFLOP/s): {shares}.")


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="Not measured here: there is no CUDA device.")
        return
    num_rounds, num_steps = (1, 2) if budget.is_quick else (5, 6)
    world = World()
    try:
        for size, names in (
            (SMALL, ["bare eager", "bare compiled", *_PLANS]),
            (LARGE, ["bare eager", "bare compiled", *(one for one in _PLANS if one != "CUDA graphs")]),
        ):
            arguments = (size, names, num_rounds, num_steps)
            found = world.run(_measure, *arguments, num_ranks=1, backend="nccl", timeout_s=420)[0]
            yield from _rows_of(size, found, names)
        yield from llama_rows(world, budget)
    finally:
        world.close()


CASE = Case(
    title="Compile and the fused loss on a GPU",
    about="""GPTs of 124 M (width 768, 12 layers, batches of 32 × 1024) and 0.9 B parameters (width 2048, 16 layers,
    8 × 2048) with 50,304 tokens and a tied head, in bf16, with fused AdamW and clipping. The rivals are bare torch
    loops that never read the loss. All take turns in one process; peak memory is what each needs alone. Then a Llama of
    transformers through the Engine, HF Trainer and Accelerate.""",
    rows=_rows,
)
