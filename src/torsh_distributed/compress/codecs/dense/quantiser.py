"""Quantiser: what codecs that send every element have in common, without the exchange over ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.compress.exchange.message_agreement import AgreementCache, signature_of
from torsh_distributed.compress.messages.compressed_gradient import MessageSpec
from torsh_distributed.errors import CompressionError


def require_payload(codec: Codec, payload: Tensor, num_elements: int) -> None:
    """Raise CompressionError unless `payload` has the size that `codec` gives a message of `num_elements`."""
    expected, got = codec.payload_bytes(num_elements), payload.numel() * payload.element_size()
    if payload.dim() != 1 or (expected is not None and got != expected):
        raise CompressionError(
            f"a {codec.name} message of {num_elements} elements has {expected} bytes",
            num_bytes=got,
            shape=tuple(payload.shape),
            dtype=payload.dtype,
        )


ROUNDING = 2.0**-20
"""Margin of the stated contractions for the rounding of scales and products in fp32."""


class Quantiser(Codec):
    """Encodes every element of a gradient, in blocks; the payload's size depends on the number of elements alone.

    The mean of a shard is encoded too, with a loss that is the same on all ranks. With `server_feedback` the rank that
    encodes a shard keeps that loss by `key.stream` and adds it to the shard's mean the next time; after a change of
    size it starts at zero.
    """

    block = 1
    """Elements that share one head, such as a scale. Shards start at its multiples."""

    parameter: float = 0.0
    """The method's parameter, if it has one: part of the signature that must be the same on all ranks."""

    def __init__(self, *, server_feedback: bool = False) -> None:
        self.server_feedback = server_feedback
        self._residuals: dict[int, Tensor] = {}
        self._agreements = AgreementCache()

    @abstractmethod
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        """Encode into `out`, uint8 and of the exact size. Element i draws with `seed` and the index `offset + i`."""

    @abstractmethod
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        """Decode `weight` times the payload into `out`, or add it; returns whether the payload was sound."""

    @override
    @abstractmethod
    def payload_bytes(self, num_elements: int) -> int: ...

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        payload = torch.empty(self.payload_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        self.write(x, payload, seed=key.own)
        return payload

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        require_payload(self, payload, num_elements)
        out = torch.empty(num_elements, dtype=torch.float32, device=payload.device)
        if not self.read(payload, out):
            raise CompressionError(
                f"a {self.name} message cannot have been written by its encoder",
                hint="it was damaged, or encoded from a gradient that was not finite",
                num_elements=num_elements,
            )
        return out

    def combine(self, payloads: Sequence[Tensor], num_elements: int, *, seed: int) -> tuple[Tensor, list[int]]:
        """The mean of the decoded payloads, summed in their order, and which of them are damaged."""
        mean = torch.empty(num_elements, dtype=torch.float32, device=payloads[0].device)
        damaged = [
            index
            for index, payload in enumerate(payloads)
            if not self.read(payload, mean, weight=1.0 / len(payloads), adds=index > 0)
        ]
        return mean, damaged

    def message_spec(self, num_elements: int) -> MessageSpec:
        """What ranks must agree on before a message of that many elements travels."""
        signature = signature_of(self.name, self.parameter, self.block)
        return MessageSpec(signature, num_elements, self.payload_bytes(num_elements))

    def require_agreement(self, x: Tensor, group: dist.ProcessGroup) -> None:
        """Raise CompressionError on every rank if ranks differ in codec or size; compared once for each size."""
        spec = self.message_spec(x.numel())
        self._agreements.require(self.name, spec.signature, spec.num_elements, group=group, device=x.device)

    def residual(self, stream: int, like: Tensor) -> Tensor | None:
        """What encoding the mean of this stream lost last time; None if nothing of that size is kept."""
        kept = self._residuals.get(stream)
        return kept.to(like.device) if kept is not None and kept.shape == like.shape else None

    def keep_residual(self, stream: int, lost: Tensor) -> None:
        """Keep the loss for the next time."""
        self._residuals[stream] = lost

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {stream: lost.clone() for stream, lost in self._residuals.items()}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals = {int(stream): lost.clone() for stream, lost in state["residuals"].items()}

    @override
    def reset(self) -> None:
        self._residuals.clear()
        self._agreements.forget()
