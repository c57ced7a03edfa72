"""Means through a codec: the engine runs the codec's own exchange in place of an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.horovod_compression import CodecCompressor
from torsh_distributed.migrate.horovod.collectives.operation_submission import all_results, submit
from torsh_distributed.migrate.horovod.collectives.reduction_names import Average, ReductionName, Sum
from torsh_distributed.migrate.horovod.negotiation.pending_op import BucketFacts
from torsh_distributed.migrate.horovod.negotiation.request import OpKind
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, set_size

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
        op=f"{op} through {compression.config.method}",
        postscale=scale,
        label="allreduce",
        run=run,
        bucket=bucket,
        finish=all_results,
    )
