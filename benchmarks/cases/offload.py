"""A model three times the size of its GPU budget: ours within the budget, against FSDP2's CPUOffloadPolicy."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit, compare
from torsh_distributed.parallel.offload import OffloadStats, PagedDataParallel, StateOffload
from torsh_distributed.plan.sections.offload import OffloadConfig
from torsh_distributed.train.demos.gpt import Block

GB = 2**30
RIVAL = "FSDP2 CPUOffloadPolicy"
FREE = "torch, all on the GPU"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A transformer and its batch."""

    width: int
    num_layers: int
    num_heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.batch


LARGE = Size(width=2048, num_layers=24, num_heads=16, vocabulary=8192, length=1024, batch=8)
SMALL = Size(width=256, num_layers=4, num_heads=4, vocabulary=512, length=128, batch=2)


class Transformer(nn.Module):
    """Decoder blocks whose activations are recomputed in backward: the budget is for state."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of next-token prediction."""
        hidden = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(size: Size) -> Transformer:
    """The same weights for every contestant."""
    torch.manual_seed(0)
    with torch.device("cuda"):  # fills them much faster
        model = Transformer(size)
    return model.cpu()


def batch(size: Size) -> tuple[Tensor, Tensor]:
    """Tokens and their next tokens, on the GPU."""
    ids = torch.randint(0, size.vocabulary, (size.batch, size.length + 1), device="cuda")
    return ids[:, :-1], ids[:, 1:]


@dataclass
class Run:
    """The run of one contestant."""

    tokens_per_s: list[float]
    peak_bytes: int
    losses: list[float]
    stats: OffloadStats | None = None


def measure(size: Size, step: Callable[[Tensor, Tensor], Tensor], num_steps: int) -> Run:
    """Time whole steps, after three to warm up; peak memory is the allocator's, from the first step on."""
    torch.manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    rates, losses = [], []
    for number in range(num_steps + 3):
        ids, targets = batch(size)
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = step(ids, targets)
        torch.cuda.synchronize()
        if number >= 3:
            rates.append(size.tokens / (time.perf_counter() - started))
        losses.append(loss.item())
    return Run(rates, torch.cuda.max_memory_allocated(), losses)


def ours(size: Size, num_steps: int, config: OffloadConfig) -> Run:
    """bf16 on the GPU, fp32 master values and moments on the host."""
    model = build(size)
    with PagedDataParallel(model, config, device="cuda", compute_dtype=torch.bfloat16) as paged:
        optimizer = paged.offload_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

        def step(ids: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = model(ids, targets)
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = measure(size, step, num_steps)
        run.stats = paged.stats()
    return run


def theirs(size: Size, num_steps: int) -> Run:
    """torch's own: every block sharded (over one GPU), parameters, gradients and Adam on the host."""
    model = build(size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in [*model.blocks, model]:
        fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return measure(size, _plain_step(model, optimizer), num_steps)


def unlimited(size: Size, num_steps: int) -> Run:
    """No budget: the whole state on the GPU, autocast to bf16. Shows what offload costs."""
    model = build(size).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss: Tensor = model(ids, targets)
        return loss

    return measure(size, _plain_step(forward, optimizer), num_steps)


def _plain_step(
    model: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model(ids, targets)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _on_the_gpu(budget: Budget) -> Iterator[Row | Note]:
    size = SMALL if budget.is_quick else LARGE
    state_bytes = 16 * sum(param.numel() for param in build(size).parameters())
    allowed = state_bytes // 3
    # Offload does not manage activations: the budget leaves room for them. Measured for these sizes, rounded up.
    activation_bytes = int(1.7 * GB) if size is LARGE else 48 * 2**20
    for_state = max(allowed - activation_bytes, 16 * 2**20)
    # Enough for layers in use and prefetched; the rest holds some of the optimizer's state (16 bytes per parameter).
    at_work = int(0.8 * GB) if size is LARGE else 10 * 2**20
    config = OffloadConfig(
        enabled=True,
        gpu_memory_budget_gb=for_state / GB,
        cpu_memory_budget_gb=64.0,
        device_optimizer_ratio=max(for_state - at_work, 0) / state_bytes,
        auto_memory_management="conservative",
    )
    runs: dict[str, Run] = {}
    contestants: dict[str, Callable[[], Run]] = {
        "torsh": lambda: ours(size, budget.num_samples, config),
        RIVAL: lambda: theirs(size, budget.num_samples),
        FREE: lambda: unlimited(size, budget.num_samples),
    }
    with _group_of_one():
        for name, run in contestants.items():
            runs[name] = run()
            gc.collect()
            torch.cuda.empty_cache()
    if not budget.is_quick and runs["torsh"].peak_bytes > allowed:
        raise RuntimeError(f"the peak of {runs['torsh'].peak_bytes} bytes is above the budget of {allowed}")
    yield Row(
        name="tokens/s",
        unit=Unit.PER_SECOND,
        ours=Measurement.of(runs["torsh"].tokens_per_s),
        rivals={name: Measurement.of(run.tokens_per_s) for name, run in runs.items() if name != "torsh"},
    )
    yield Row(
        name="peak GPU memory",
        unit=Unit.BYTES,
        ours=Measurement.of([runs["torsh"].peak_bytes]),
        rivals={name: Measurement.of([run.peak_bytes]) for name, run in runs.items() if name != "torsh"},
    )
    stats = runs["torsh"].stats
    assert stats is not None
    steps = budget.num_samples + 3
    yield Note(
        text=f"Parameters, gradients and Adam's state are {state_bytes / GB:.2f} GiB, the GPU budget is a third, "
        f"{allowed / GB:.2f} GiB. Ours held at most {stats.device.peak_bytes / GB:.2f} GiB of state there, waited "
        f"{stats.stall_s / steps * 1e3:.1f} ms per step for parameters, updated for "
        f"{stats.update_s / steps * 1e3:.0f} ms per step, and moved {stats.host_to_device_bytes / steps / GB:.2f} GiB "
        f"in and {stats.device_to_host_bytes / steps / GB:.2f} GiB out. Last losses: "
        + ", ".join(f"{name} {run.losses[-1]:.3f}" for name, run in runs.items())
        + "."
    )


class _group_of_one:  # noqa: N801 (used like a function)
    """FSDP2 needs a process group even on one GPU."""

    def __enter__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))

    def __exit__(self, *exception: object) -> None:
        dist.destroy_process_group()


def _updates(budget: Budget) -> Iterator[Row]:
    """The update alone, on the host: it needs no GPU."""
    numel = 1 << (18 if budget.is_quick else 24)
    stepped: dict[str, Callable[[], object]] = {}
    for name in ("ours", "fused", "foreach"):
        model = nn.Linear(1024, numel // 1024, bias=False)
        model.weight.grad = torch.randn_like(model.weight)
        options = {"fused": name == "fused", "foreach": name == "foreach"} if name != "ours" else {}
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
        if name == "ours":
            off = OffloadConfig(enabled=True, params=False, grads=False)
            optimizer = StateOffload(model, optimizer, off).optimizer
        stepped[name] = optimizer.step
    yield compare(
        f"AdamW update of {numel >> 20 or numel / 2**20} M parameters on the host",
        stepped["ours"],
        {"torch AdamW fused": stepped["fused"], "torch AdamW foreach": stepped["foreach"]},
        budget=budget,
    )


def rows(budget: Budget) -> Iterator[Row | Note]:
    """The update on the host, and whole training steps if there is a GPU."""
    yield from _updates(budget)
    if torch.cuda.is_available():
        yield from _on_the_gpu(budget)
    else:
        yield Note(text="Training beyond a GPU's budget was not measured: this machine has no CUDA device.")


CASE = Case(
    title="Training beyond the GPU's memory",
    about="""A transformer whose parameters, gradients and Adam state are three times a set GPU budget: one GPU, bf16
    with fp32 master values, activations recomputed. Ours stays within the budget; FSDP2 with CPUOffloadPolicy and
    fused AdamW does the same training in the same process, one after the other, and needs less GPU memory; the last
    column has no budget. A step is forward, backward and update.""",
    rows=rows,
)
