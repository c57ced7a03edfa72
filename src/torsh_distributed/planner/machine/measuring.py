"""Measures what operations cost on a device: products by shape, attention, families by size, launches, the update."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from torsh_distributed.planner.machine.measured_rates import OperationRates, ProductTable, SizeTable

_BLOCKS = 5
_BLOCK_S = 0.004
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SIDES = {"cpu": (16, 64, 256, 1024), "cuda": (128, 1024, 4096, 16384)}
_SIZES = {"cpu": (2**10, 2**14, 2**18, 2**21, 2**24), "cuda": (2**12, 2**18, 2**22, 2**26, 2**29)}
_LENGTHS = {"cpu": (32, 128, 512), "cuda": (128, 1024, 4096)}
_WIDTH = 256
"""Of rows that a softmax or a norm goes over."""
_VOCABULARY = 1024
_CHAIN = 100
_POOL_NUMEL = 2**24
"""More than caches hold: 64 MiB of fp32."""
_MOST_OPERANDS = 256
_MOST_TENSORS = 64


@dataclass
class OperationTimer:
    """Times calls on a device in blocks. `meet` lets the ranks of a machine begin a block together."""

    device: torch.device
    meet: Callable[[], None] = lambda: None
    spreads: list[float] = field(default_factory=list)
    """Of each point: largest less smallest block over the median."""

    def seconds(self, call: Callable[[], object]) -> float:
        """The median of some blocks of calls, for each call."""
        call()
        self._finish()
        started = time.perf_counter()
        call()
        self._finish()
        once = time.perf_counter() - started
        count = max(1, min(1000, int(_BLOCK_S / max(once, 1e-7))))
        self.meet()
        taken = []
        for _ in range(_BLOCKS):
            started = time.perf_counter()
            for _ in range(count):
                call()
            self._finish()
            taken.append((time.perf_counter() - started) / count)
        middle = statistics.median(taken)
        self.spreads.append((max(taken) - min(taken)) / middle)
        return middle

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_operations(timer: OperationTimer) -> OperationRates:
    """All rates of one device; every rank that shares the machine calls this at the same time."""
    device = timer.device
    formats = ("fp32", "bf16") if device.type == "cuda" else ("fp32",)
    forward, backward = _autograd_launch(timer)
    attention = {}
    for name in formats:
        attention[name], attention[f"{name} backward"] = _attention(timer, _DTYPES[name])
    return OperationRates(
        products={name: _products(timer, _DTYPES[name]) for name in formats},
        attention=attention,
        families=_families(timer),
        launch_s=forward,
        backward_launch_s=backward,
        update=_update(timer),
    )


def _products(timer: OperationTimer, dtype: torch.dtype) -> ProductTable:
    """With a right operand that no cache holds: a step comes back to a weight after all others."""
    sides = _SIDES[timer.device.type]
    pool = torch.randn(_POOL_NUMEL, device=timer.device).to(dtype)

    def rate(m: int, n: int, k: int) -> float:
        left, numel = torch.randn(m, k, device=timer.device).to(dtype), k * n
        whole = pool if numel <= pool.numel() else torch.randn(numel, device=timer.device).to(dtype)
        starts = range(0, whole.numel() - numel + 1, numel)[:_MOST_OPERANDS]
        weights = itertools.cycle([whole[at : at + numel].view(k, n) for at in starts])
        return 2.0 * m * n * k / timer.seconds(lambda: torch.mm(left, next(weights)))

    return ProductTable(sides, tuple(tuple(tuple(rate(m, n, k) for k in sides) for n in sides) for m in sides))


def _attention(timer: OperationTimer, dtype: torch.dtype) -> tuple[SizeTable, SizeTable]:
    """Causal attention of four heads of 64, by its operations: forward, and backward alone."""
    flops, forward, backward = [], [], []
    for length in _LENGTHS[timer.device.type]:
        heads = [torch.randn(4, 4, length, 64, device=timer.device, dtype=dtype).requires_grad_() for _ in range(3)]

        def ahead(heads: list[Tensor] = heads) -> Tensor:
            query, key, value = heads
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        out = ahead()
        gradient = torch.ones_like(out)

        def back(out: Tensor = out, gradient: Tensor = gradient, heads: list[Tensor] = heads) -> object:
            return torch.autograd.grad(out, heads, gradient, retain_graph=True)

        flops.append(4.0 * 4 * 4 * length * length * 64)
        forward.append(timer.seconds(ahead))
        backward.append(timer.seconds(back))
    return SizeTable(tuple(flops), tuple(forward)), SizeTable(tuple(2.5 * one for one in flops), tuple(backward))


def _families(timer: OperationTimer) -> dict[str, SizeTable]:
    """Of values that no cache holds, into memory that was not just written: a step keeps its results for backward."""
    found: dict[str, SizeTable] = {}
    pool = torch.randn(_POOL_NUMEL, device=timer.device)
    for family in _CALLS:
        points: dict[float, float] = {}
        for size in _SIZES[timer.device.type]:
            rows, width = max(1, size // 4 // _WIDTH), min(_WIDTH, size // 4)
            numel = rows * width
            whole = pool if numel <= pool.numel() else torch.randn(numel, device=timer.device)
            starts = range(0, whole.numel() - numel + 1, numel)[:_MOST_OPERANDS]
            made = [_CALLS[family](whole[at : at + numel].view(rows, width)) for at in starts]
            points[made[0][1]] = timer.seconds(_in_turns([call for call, _ in made]))
        found[family] = SizeTable(tuple(sorted(points)), tuple(points[one] for one in sorted(points)))
    return found


def _in_turns(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """Each call in its turn; as many results as there are calls are kept."""
    turns, kept = itertools.cycle(calls), deque[object](maxlen=len(calls))
    return lambda: kept.append(next(turns)())


_Made = tuple[Callable[[], object], float]
"""A call, and the bytes that it reads and writes as a trace counts them."""


def _norm(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = torch.ones(values.shape[-1], device=values.device)
    return weight, *torch.native_layer_norm(values, values.shape[-1:], weight, weight, 1e-5)


def _norm_back(values: Tensor) -> _Made:
    weight, out, mean, scale = _norm(values)
    shape = values.shape[-1:]

    def call() -> object:
        return torch.ops.aten.native_layer_norm_backward(
            out, values, shape, mean, scale, weight, weight, [True, True, True]
        )

    return call, 3.0 * values.nbytes


def _lookup(values: Tensor) -> _Made:
    table = torch.randn(_VOCABULARY, values.shape[-1], device=values.device)
    places = torch.randint(_VOCABULARY, (values.shape[0],), device=values.device)
    return lambda: functional.embedding(places, table), 2.0 * values.nbytes


def _lookup_back(values: Tensor) -> _Made:
    places = torch.randint(_VOCABULARY, (values.shape[0],), device=values.device)
    table_bytes = _VOCABULARY * values.shape[-1] * 4

    def call() -> object:
        return torch.ops.aten.embedding_dense_backward(values, places, _VOCABULARY, -1, False)

    return call, float(values.nbytes + table_bytes)


def _softmax_back(values: Tensor) -> _Made:
    out = values.softmax(-1)
    return lambda: torch.ops.aten._softmax_backward_data(values, out, -1, torch.float32), 3.0 * values.nbytes


_CALLS: dict[str, Callable[[Tensor], _Made]] = {
    "elementwise": lambda values: (lambda: values + values, 3.0 * values.nbytes),
    "activation": lambda values: (lambda: functional.gelu(values), 2.0 * values.nbytes),
    "activation backward": lambda values: (
        lambda: torch.ops.aten.gelu_backward(values, values),
        3.0 * values.nbytes,
    ),
    "softmax": lambda values: (lambda: values.softmax(-1), 2.0 * values.nbytes),
    "softmax backward": _softmax_back,
    "norm": lambda values: (lambda: _norm(values), 2.0 * values.nbytes),
    "norm backward": _norm_back,
    "lookup": _lookup,
    "lookup backward": _lookup_back,
    "sum": lambda values: (lambda: values.sum(-1), 1.0 * values.nbytes),
    "copy": lambda values: (values.clone, 2.0 * values.nbytes),
    "random": lambda values: (lambda: torch.empty_like(values).bernoulli_(0.9), 1.0 * values.nbytes),
    "power": lambda values: (lambda: values.pow(2), 2.0 * values.nbytes),
}


def _autograd_launch(timer: OperationTimer) -> tuple[float, float]:
    """What autograd adds to an operation, in forward and in backward: a chain of them on one element."""
    plain = torch.ones(1, device=timer.device)
    traced = torch.ones(1, device=timer.device, requires_grad=True)

    def chain(start: Tensor) -> Tensor:
        for _ in range(_CHAIN):
            start = start * 1.0
        return start

    def both() -> object:
        return torch.autograd.grad(chain(traced), traced)

    raw, ahead, whole = (timer.seconds(call) for call in (lambda: chain(plain), lambda: chain(traced), both))
    return max(0.0, ahead - raw) / _CHAIN, max(0.0, whole - ahead - raw) / _CHAIN


def _update(timer: OperationTimer) -> SizeTable:
    """AdamW on some equal tensors, for each of them; together more than caches hold, but for the smallest."""
    sizes, seconds = [], []
    for size in _SIZES[timer.device.type]:
        count = max(4, min(_MOST_TENSORS, _POOL_NUMEL // size))
        params = [torch.ones(max(1, size // 4), device=timer.device, requires_grad=True) for _ in range(count)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        sizes.append(float(max(1, size // 4) * 4))
        seconds.append(timer.seconds(optimizer.step) / count)
    return SizeTable(tuple(sizes), tuple(seconds))
