"""What encoding and decoding a gradient costs, on one core."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.harness import Budget, Case, Note, Row, Unit, Workload, compare
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.kernels.kernel_choice import compiled_kernels

_METHODS = (
    "fp16",
    "bf16",
    "int8",
    "nbit:8",
    "nbit:4",
    "nbit:2",
    "sign",
    "ternary",
    "ternary:0",
    "bimodal:16",
    "natural",
    "topk:0.01",
    "randomk:0.01",
    "powersgd:4",
)


def _gradients(num_layers: int) -> tuple[Tensor, list[tuple[int, ...]]]:
    """The gradients of a network after a few training steps, concatenated; and their shapes."""
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(64, 1024)), torch.randint(0, 10, (64,)))
        loss.backward()
        optimizer.step()
    found = [param.grad for param in model.parameters() if param.grad is not None]
    return torch.cat([grad.flatten() for grad in found]), [tuple(grad.shape) for grad in found]


def _halves(method: str, x: Tensor, shapes: list[tuple[int, ...]]) -> tuple[Workload, Workload]:
    """Encode and decode, into preallocated memory if the codec can."""
    codec, key = make_codec(method), Key(step=1)
    codec.set_shapes(key.stream, shapes)
    payload = codec.encode(x, key)
    if isinstance(codec, DenseCodec):
        raw, out = payload.view(torch.uint8), torch.empty_like(x)
        return lambda: codec.write(x, raw, seed=key.own), lambda: codec.read(raw, out)
    return lambda: codec.encode(x, key), lambda: codec.decode(payload, x.numel(), key)


def _torch_int8(x: Tensor) -> tuple[Workload, Workload]:
    """The arithmetic of torch's `quantization_pertensor_hook`: one scale for all, without the search for it."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as hooks

    scale, zero = float(x.max() - x.min()) / 255, 128
    codes = hooks._quantize_per_tensor_backend(x, scale, zero)
    return (
        lambda: hooks._quantize_per_tensor_backend(x, scale, zero),
        lambda: hooks._dequantize_per_tensor_backend(codes, scale, zero),
    )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    x, shapes = _gradients(1 if budget.is_quick else 8)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if compiled_kernels() is None:
            yield Note(text="The compiled kernels were not built here: torch's operators were used.")
        copied = torch.empty_like(x)
        yield _row("copy of the gradient", lambda: copied.copy_(x), {}, x, budget)
        for method in _METHODS:
            encode, decode = _halves(method, x, shapes)
            rivals = {"torch hook": _torch_int8(x)} if method == "int8" else {}
            encoders = {name: halves[0] for name, halves in rivals.items()}
            decoders = {name: halves[1] for name, halves in rivals.items()}
            yield _row(f"{method}, encode", encode, encoders, x, budget)
            yield _row(f"{method}, decode", decode, decoders, x, budget)
            both = {name: _after(*halves) for name, halves in rivals.items()}
            yield _row(f"{method}, encode and decode", _after(encode, decode), both, x, budget)
    finally:
        torch.set_num_threads(num_threads)


def _row(name: str, ours: Workload, rivals: dict[str, Workload], x: Tensor, budget: Budget) -> Row:
    return compare(name, ours, rivals, budget=budget, amount=4 * x.numel(), unit=Unit.BYTES_PER_SECOND)


def _after(first: Workload, second: Workload) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


CASE = Case(
    title="Codecs: encoding and decoding on one core",
    about="""Gradients of 8 × Linear 1024 (8.4 M parameters, 32 MB in fp32) after three steps of training, one thread.
    Rates count the bytes of the gradient, not of the message. The rival of int8 is the arithmetic of torch's
    quantization_pertensor_hook, which uses one scale for the whole bucket.""",
    rows=_rows,
)
