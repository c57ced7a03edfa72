"""The dense codecs on a GPU: encoding and decoding against a plain copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.kernels.torch_kernels import TorchKernels

MB = 2**20
_METHODS = ("int8", "sign", "natural", "ternary", "nbit:4")


_CALLS = 10


def _seconds(call: Callable[[], object], num_rounds: int) -> float:
    """Seconds per call, over ten in a row, as buckets follow each other."""
    call()
    times = []
    for _ in range(num_rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(_CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / _CALLS)
    return statistics.median(times)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="Not measured here: there is no GPU.")
        return
    num_bytes, rounds = (MB, 3) if budget.is_quick else (256 * MB, 20)
    x = torch.randn(num_bytes // 4, device="cuda") * torch.rand(num_bytes // 4, device="cuda")
    out, copy = torch.empty_like(x), torch.empty_like(x)
    copy_s = _seconds(lambda: copy.copy_(x), rounds)
    copied_per_s = 2 * num_bytes / copy_s
    yield Note(text=f"A copy of {num_bytes // MB} MB moves {copied_per_s / 1e9:.0f} GB/s, read and written.")
    for method in _METHODS:
        codec = make_codec(method)
        assert isinstance(codec, DenseCodec)
        payload = torch.empty(codec.payload_bytes(x.numel()), dtype=torch.uint8, device="cuda")
        encode = _seconds(lambda c=codec, p=payload: c.write(x, p, seed=1), rounds)  # type: ignore[misc]
        decode = _seconds(lambda c=codec, p=payload: c.read(p, out), rounds)  # type: ignore[misc]
        moved_per_s = 2 * (num_bytes + payload.numel()) / (encode + decode)
        yield Row(
            name=f"{method}, encode + decode",
            unit=Unit.SECONDS,
            ours=Measurement.of([encode + decode]),
            rivals={"copy there and back": Measurement.of([2 * copy_s])},
        )
        yield Note(
            text=f"{method}: encode {encode * 1e6:.0f} µs, decode {decode * 1e6:.0f} µs; reads and writes"
            f" {moved_per_s / 1e9:.0f} GB/s, {moved_per_s / copied_per_s:.0%} of a copy."
        )
    payload = torch.empty(4 * -(-x.numel() // 256) + x.numel(), dtype=torch.uint8, device="cuda")
    plain = _seconds(lambda: TorchKernels().int8_encode(x, 256, payload), rounds)
    yield Note(text=f"int8 encoded by torch's operators instead of one kernel: {plain * 1e6:.0f} µs.")


CASE = Case(
    title="Codecs on a GPU",
    about="""Gradients of 256 MB in fp32 on one GPU, encoded and decoded with our kernels, against a plain device copy
    of the same tensor, twice, in the same run. Share of a copy: bytes read and written per second relative to a
    copy.""",
    rows=_rows,
)
