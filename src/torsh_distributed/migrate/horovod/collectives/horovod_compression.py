"""`Compression`: casts, as Horovod has them, and this library's codecs, which also work on sums of many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.codecs.registry import codec_names
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.operation_submission import (
    OperationResults,
    OperationTerms,
    all_results,
    submit,
)
from torsh_distributed.migrate.horovod.collectives.reduction_names import Average, ReductionName, Sum
from torsh_distributed.migrate.horovod.negotiation.request import BucketFacts, OpKind
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, set_size
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


_compressors: WeakKeyDictionary[CodecCompressor, dict[str, GradientCompressor]] = WeakKeyDictionary()
"""What each codec remembers, by group."""


def submit_codec_mean(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    name: str | None,
    compression: CodecCompressor,
    op: ReductionName,
    scale: float,
    process_set: ProcessSet,
    *,
    ends_step: bool = True,
    bucket: BucketFacts | None = None,
) -> int:
    """Average copies of the tensors through the codec, times `scale`; a Sum is the mean times the number of ranks.

    `names`: what error feedback is kept under. `ends_step`: the last operation of a training step.
    """
    if op not in (Average, Sum):
        raise InvalidArgument("a codec averages or sums", hint="use op=hvd.Average, or Compression.none", op=str(op))
    if any(not tensor.dtype.is_floating_point for tensor in tensors):
        raise InvalidArgument("a codec takes floating-point tensors", hint="use Compression.none for integers")
    factor = scale * (set_size(process_set) if op == Sum else 1)

    def run(group: dist.ProcessGroup) -> tuple[list[Tensor], int]:
        kept = _compressors.setdefault(compression, {})
        if group.group_name not in kept:
            kept[group.group_name] = GradientCompressor(compression.config, group=group)
        compressor = kept[group.group_name]
        copies = [tensor.detach().clone() for tensor in tensors]
        sent_bytes = average_named(compressor, list(names), copies, group)
        if ends_step:
            compressor.step()
        return [copy if factor == 1.0 else copy.mul_(factor) for copy in copies], sent_bytes

    return submit(
        OpKind.AVERAGED,
        tensors,
        name,
        process_set,
        OperationTerms(op=f"{op} through {compression.config.method}", postscale=scale),
        OperationResults(run=run, bucket=bucket, finish=all_results),
        label="allreduce",
    )
