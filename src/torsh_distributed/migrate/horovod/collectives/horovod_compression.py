"""`Compression`: casts, as Horovod has them, and this library's codecs, which also work on sums of many ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.registry import codec_names
from torsh_distributed.plan.sections.compress import CompressConfig


class Compressor:
    """Makes a tensor smaller before it travels. Scripts derive their own and pass the class or an object."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that travels, and what `decompress` needs. Both have to commute with sums."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its first form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    @override
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    @override
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors as another, smaller dtype."""

    dtype: torch.dtype

    @classmethod
    @override
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    @override
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(CastCompressor):
    """Sends float16."""

    dtype = torch.float16


class BF16Compressor(CastCompressor):
    """Sends bfloat16: the range of float32 with fewer digits, so large gradients do not overflow."""

    dtype = torch.bfloat16


class CodecCompressor(Compressor):
    """Sends means through one of this library's codecs, with error feedback under the operation's name.

    A codec's messages cannot be added up on the way, so `compress` and `decompress` alone have no meaning for it: the
    operation carries it out. For Average and Sum of floating-point tensors.
    """

    def __init__(self, config: CompressConfig) -> None:
        self.config = config

    @staticmethod
    @override
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    @override
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _ByName(type):
    """`Compression.topk`: a codec with its usual number."""

    def __getattr__(cls, name: str) -> CodecCompressor:
        if name.startswith("_") or name not in codec_names():
            raise AttributeError(
                f"Compression has no {name!r}: none, fp16, bf16, codec() and {', '.join(codec_names())}"
            )
        return CodecCompressor(CompressConfig(method=name))


class Compression(metaclass=_ByName):
    """How tensors travel: `none`, `fp16`, `bf16`; or a codec by name (`Compression.powersgd`) or by `codec()`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def codec(method: str, **settings: Any) -> CodecCompressor:
        """A codec such as "topk:0.01", with the settings of a plan's `compress` section (`warmup_steps`, …)."""
        return CodecCompressor(CompressConfig(method=method, **settings))
