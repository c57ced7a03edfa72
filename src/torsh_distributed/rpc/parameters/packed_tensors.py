"""Tensors on their way to a server and back: whole, or in fewer bytes by a codec."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.comm.serialization import DTYPES, TAGS
from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.compress.codecs.registry import make_codec
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.compress.messages.compressed_gradient import DENSE, is_finite
from torsh_distributed.errors import CompressionError, InvalidArgument
from torsh_distributed.plan.sections.compress import METHODS, CompressConfig
from torsh_distributed.rpc.serving.exposed import sendable

VALUE_CODECS = ("fp16", "bf16", "int8", "nbit")
"""Codecs that are near to every value: for parameters and rows, of which nothing may be left out."""


@sendable
@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor by a codec, with all that the other side needs."""

    method: str
    payload: Tensor
    shape: list[int]
    tag: int
    key: list[int]


Packed = Tensor | PackedTensor


@functools.cache
def _codec(method: str) -> Codec:
    return make_codec(method)


def pack_values(name: str, tensor: Tensor, method: str | None, step: int) -> Packed:
    """Parameters, or rows. Numbers that are not finite or not floating-point travel whole."""
    if method is None or not tensor.is_floating_point() or not is_finite(tensor):
        return tensor
    key = Key(step=step, stream=zlib.crc32(name.encode()))
    payload = _codec(method).encode(tensor.detach().float().reshape(-1), key)
    return PackedTensor(method, payload, list(tensor.shape), TAGS[tensor.dtype], list(key))


def unpack(packed: Packed) -> Tensor:
    """The tensor. CompressionError if it is not one."""
    if isinstance(packed, Tensor):
        return packed
    if not isinstance(packed, PackedTensor) or not 0 <= packed.tag < len(DTYPES):
        raise CompressionError("a packed tensor was expected", type=type(packed).__name__)
    numel = torch.Size(packed.shape).numel()
    if packed.method == DENSE:
        flat = packed.payload
    else:
        check_codec(packed.method, values_only=False)
        flat = _codec(packed.method).decode(packed.payload, numel, Key(*packed.key))
    if flat.numel() != numel:
        raise CompressionError("a packed tensor is of another size than it says", numel=flat.numel(), expected=numel)
    return flat.to(DTYPES[packed.tag]).view(packed.shape)


def packed_bytes(packed: Iterable[Packed]) -> int:
    """Bytes of values as they travel."""
    return sum(one.nbytes if isinstance(one, Tensor) else one.payload.nbytes for one in packed)


def check_codec(method: str | None, *, values_only: bool) -> None:
    """InvalidArgument if a codec is not for this."""
    if method is None:
        return
    name = method.partition(":")[0]
    is_other = name not in METHODS or METHODS[name].codec is None or METHODS[name].needs_whole_gradients
    if is_other or (values_only and name not in VALUE_CODECS):
        fits = VALUE_CODECS if values_only else [one for one, kind in METHODS.items() if not kind.needs_whole_gradients]
        raise InvalidArgument(
            "this codec is not for " + ("parameters" if values_only else "gradients to a server"),
            hint=f"one of: {', '.join(fits)}",
            codec=method,
        )


class GradientPacker:
    """Packs a worker's gradients; what a codec leaves out of one is added to the next of that name.

    What travels is on the CPU, where servers keep parameters: a tensor of a GPU would arrive on the server's GPU.
    """

    def __init__(self, method: str | None) -> None:
        check_codec(method, values_only=False)
        self._method = method
        self._compressor = None
        if method is not None:
            self._compressor = GradientCompressor(CompressConfig(method=method, warmup_steps=0))

    def pack(self, name: str, gradient: Tensor) -> Packed:
        """One gradient."""
        if self._compressor is None:
            return gradient.detach().cpu()
        message = self._compressor.compress(name, gradient)
        key = [int(part) for part in message.metadata["key"]]
        return PackedTensor(message.method, message.data.cpu(), list(gradient.shape), TAGS[gradient.dtype], key)

    def pack_rows(self, name: str, gradient: Tensor, step: int) -> Packed:
        """Of rows, which are others each time, so nothing may be left out: no codec that chooses elements."""
        is_near = self._method is not None and self._method.partition(":")[0] in VALUE_CODECS
        return pack_values(name, gradient.cpu(), self._method if is_near else None, step)

    def step(self) -> None:
        """A push has been packed."""
        if self._compressor is not None:
            self._compressor.step()
