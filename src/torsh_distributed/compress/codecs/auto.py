"""The method `auto`: measures, tries and picks a codec for each bucket, and measures again when the link changes.

For every stream (a bucket):

1. Once, it measures the time to encode and decode the bucket by each candidate, and the link by all-reduces.
2. From these it estimates each candidate, "none" included, and tries those near the best on the gradients of real
   steps, so no traffic is spent on measuring. The whole average is timed, error feedback included. Where "none" wins, a
   bucket is averaged in place, as without compression.
3. The fastest stays. Every 16 steps its time is compared with what it was; if it changed, the link is measured again.

Ranks average their measurements before they decide, so all decide alike. Candidates are methods that keep the loss
under error feedback; without it, those that are nearly exact.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.measurement import NetworkProfiler
from torsh_distributed.compress.codecs.base import Averaged, Codec, Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.errors import InvalidArgument

NONE = "none"
CANDIDATES = (NONE, "bf16", "int8", "topk:0.01", "powersgd:4")
NEARLY_EXACT = (NONE, "bf16", "int8")
"""Candidates without error feedback."""

_NEAR = 1.5  # estimates within this factor of the best are tried
_MAX_TRIED = 3
_NUM_TRIALS = 2
_WINDOW = 16  # calls over which the time of the chosen one is watched
_CHANGED = 2.0  # the link has changed when the least time in a window differs by this factor


@dataclass
class _StreamChoice:
    """The measurements of one bucket, and the state of its choice."""

    compute_s: dict[str, float] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)
    to_try: list[str] = field(default_factory=list)
    tried_s: dict[str, float] = field(default_factory=dict)
    choice: str | None = None
    expected_s: float = 0.0
    window: list[float] = field(default_factory=list)
    num_windows: int = 0
    patience: int = 1
    """Windows before a change counts; it doubles with every new measurement."""
    is_new: bool = False
    """Whether the present average includes the time of measuring."""

    @property
    def is_known(self) -> bool:
        """Whether there is a choice, or a candidate to try."""
        return self.choice is not None or bool(self.to_try)

    @property
    def method(self) -> str:
        """The method of the next average, if `is_known`."""
        return self.choice or self.to_try[0]


class AutoCodec(Codec):
    """A choice among codecs, made for each stream by measurement, the same on all ranks."""

    name = "auto"
    is_deterministic = False

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        self._codecs = dict(codecs)
        self._streams: dict[int, _StreamChoice] = {}

    @property
    def choices(self) -> dict[int, str]:
        """The method of each stream that has been decided."""
        return {number: stream.choice for number, stream in self._streams.items() if stream.choice is not None}

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        stream = self._streams.setdefault(key.stream, _StreamChoice())
        method = NONE
        if group.size() > 1 and x.numel() > 0:
            if stream.is_known:
                method = stream.method
            else:
                self._shortlist(stream, x, group, key)
        return self._codecs[method].average(x, group, key)

    def sends_as_it_is(self, key: Key) -> bool:
        """Whether this stream travels uncompressed this time, so nothing needs preparing for a codec."""
        stream = self._streams.get(key.stream)
        return stream is not None and stream.is_known and stream.method == NONE

    def note(self, key: Key, spent_s: float, group: dist.ProcessGroup) -> None:
        """Record how long a whole average of this stream took; every rank calls this after each."""
        stream = self._streams.get(key.stream)
        if stream is None or not stream.is_known:
            return
        if stream.is_new:  # the time went into measuring
            stream.is_new = False
        elif stream.choice is None:
            self._note_trial(stream, stream.method, spent_s, group, key)
        else:
            self._watch(stream, spent_s, group, key)

    def _shortlist(self, stream: _StreamChoice, x: Tensor, group: dist.ProcessGroup, key: Key) -> None:
        if not stream.compute_s:
            for method, codec in self._codecs.items():
                stream.compute_s[method], stream.payload_bytes[method] = _compute_s(codec, x, key)
            stream.compute_s[NONE] = 0.0  # it is averaged in place
            agreed = _mean_over_ranks(list(stream.compute_s.values()), group, x.device)
            stream.compute_s = dict(zip(stream.compute_s, agreed, strict=True))
        network = NetworkProfiler(group, device=x.device).measure()
        estimates = {
            method: stream.compute_s[method] + network.estimated_s(stream.payload_bytes[method])
            for method in self._codecs
        }
        best = min(estimates.values())
        near = sorted((method for method in estimates if estimates[method] <= _NEAR * best), key=estimates.__getitem__)
        stream.to_try = [method for method in near[:_MAX_TRIED] for _ in range(_NUM_TRIALS)]
        stream.tried_s = {}
        stream.is_new = True
        events.emit(
            events.DecisionEvent(
                subject=f"compression of stream {key.stream:#x}: what to try",
                choice=", ".join(near[:_MAX_TRIED]),
                reason=f"{1e-6 / network.byte_s:.0f} MB/s, {network.latency_s * 1e6:.0f} µs a message; estimated "
                + ", ".join(f"{method} {seconds * 1e3:.2f} ms" for method, seconds in estimates.items()),
            )
        )

    def _note_trial(
        self, stream: _StreamChoice, method: str, spent_s: float, group: dist.ProcessGroup, key: Key
    ) -> None:
        stream.tried_s[method] = min(spent_s, stream.tried_s.get(method, spent_s))
        stream.to_try.pop(0)
        if stream.to_try:
            return
        times = _mean_over_ranks(list(stream.tried_s.values()), group, _device(group))
        tried_s = dict(zip(stream.tried_s, times, strict=True))
        stream.choice = min(tried_s, key=tried_s.__getitem__)
        stream.expected_s = tried_s[stream.choice]
        stream.window, stream.num_windows = [], 0
        events.emit(
            events.DecisionEvent(
                subject=f"compression of stream {key.stream:#x}",
                choice=stream.choice,
                reason="tried: " + ", ".join(f"{method} {seconds * 1e3:.2f} ms" for method, seconds in tried_s.items()),
            )
        )

    def _watch(self, stream: _StreamChoice, spent_s: float, group: dist.ProcessGroup, key: Key) -> None:
        stream.window.append(spent_s)
        if len(stream.window) < _WINDOW:
            return
        # The least: a rank that waits for a late one measures the other's delay, but not every time.
        [least_s] = _mean_over_ranks([min(stream.window)], group, _device(group))
        stream.window = []
        stream.num_windows += 1
        factor = least_s / stream.expected_s
        if stream.num_windows == 1 and factor < _CHANGED:
            stream.expected_s = least_s  # the least of many is less than that of two trials
            return
        if stream.num_windows < stream.patience or 1 / _CHANGED < factor < _CHANGED:
            return
        events.emit(
            events.DecisionEvent(
                subject=f"compression of stream {key.stream:#x}",
                choice="measure again",
                reason=f"{stream.choice} takes {least_s * 1e3:.2f} ms instead of {stream.expected_s * 1e3:.2f} ms",
            )
        )
        stream.choice = None
        stream.patience *= 2

    @override
    def set_shapes(self, stream: int, shapes: Sequence[Sequence[int]]) -> None:
        for codec in self._codecs.values():
            codec.set_shapes(stream, shapes)

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        raise _needs_a_group()

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        raise _needs_a_group()

    @override
    def payload_bytes(self, num_elements: int) -> int | None:
        return None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "choices": self.choices,
            "expected_s": {number: stream.expected_s for number, stream in self._streams.items() if stream.choice},
            "codecs": {method: codec.state_dict() for method, codec in self._codecs.items()},
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._streams = {
            int(number): _StreamChoice(choice=choice, expected_s=state["expected_s"][number])
            for number, choice in state["choices"].items()
            if choice in self._codecs
        }
        for method, codec in self._codecs.items():
            if method in state["codecs"]:
                codec.load_state_dict(state["codecs"][method])

    @override
    def reset(self) -> None:
        self._streams = {}
        for codec in self._codecs.values():
            codec.reset()


def _compute_s(codec: Codec, x: Tensor, key: Key) -> tuple[float, int]:
    """Seconds that a rank needs to prepare, encode and decode one average, and the size of its message."""
    started = time.perf_counter()
    x.clone().add_(x).sub_(x)  # error feedback and packing: about as many passes
    payload = codec.encode(x, key)
    _finish(x)
    encoded = time.perf_counter()
    codec.decode(payload, x.numel(), key)
    _finish(x)
    encode_s, decode_s = encoded - started, time.perf_counter() - encoded
    # A dense message is decoded twice: the parts of this rank's shard, and the means of all shards.
    num_decodes = 2 if isinstance(codec, DenseCodec) and payload.dtype == torch.uint8 else 1
    return encode_s + num_decodes * decode_s, payload.numel() * payload.element_size()


def _mean_over_ranks(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    return [value / group.size() for value in all_reduce(numbers, group=group).tolist()]


def _device(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _needs_a_group() -> InvalidArgument:
    return InvalidArgument(
        "method 'auto' measures the link between ranks, so it cannot compress by hand",
        hint="average over a group, or name a codec: int8, topk:0.01, powersgd:4",
    )
