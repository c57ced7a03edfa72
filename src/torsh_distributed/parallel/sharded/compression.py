"""Compression under FSDP2: encoded gradients in its reduce-scatter slot, or between replicas of shards.

Over one shard axis every rank encodes its gradient for each owner; error feedback then keeps what was left out of the
whole piece: as many bytes as its gradient in fp32. Replicas of shards (mesh.dp) are connected by the slow link: shards
are reduced uncompressed, and their means are sent encoded between the replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.compress.compressor_state import stream_of
from torsh_distributed.compress.exchange.dense_exchange import all_gather_encoded
from torsh_distributed.compress.exchange.scatter import scattered_mean
from torsh_distributed.compress.messages.compressed_gradient import is_finite
from torsh_distributed.compress.messages.sparse import dense
from torsh_distributed.compress.named_buffers import FlatEntry, FlatLayout
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.sharded.communication import CommTally, PlainBuffers, gather, reduce_scatter
from torsh_distributed.parallel.torch_internals import AllGather, ReduceScatter
from torsh_distributed.plan import CompressConfig
from torsh_distributed.plan.sections.compress import METHODS


class ParamShard(NamedTuple):
    """One parameter's part of a rank's shard of a piece."""

    name: str
    shape: tuple[int, ...]
    """Rows that a rank owns, padded to equal counts, then the parameter's other dims."""

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()


def check_method(config: CompressConfig, *, has_replicas: bool) -> None:
    """Refuse what does not go with shards, before anything is built."""
    if not has_replicas and METHODS[config.name].needs_whole_gradients:
        raise ConfigurationError(
            f"compress.method {config.name!r} needs whole gradients, which a shard axis does not have",
            hint="choose int8, topk or another element-wise method, or add replicas (mesh.dp above 1)",
        )
    if not has_replicas and config.error_feedback == "ef21":
        raise ConfigurationError(
            "compress.error_feedback 'ef21' needs whole gradients, which a shard axis does not have",
            hint='set it to "ef14", or add replicas (mesh.dp above 1)',
        )


def param_shards_of(numel: int, known: Sequence[ParamShard], name: str) -> Sequence[ParamShard]:
    """The param_shards of a shard of `numel` elements; one for all where parameters without a gradient are left out."""
    return known if sum(param_shard.numel for param_shard in known) == numel else [ParamShard(name, (numel,))]


class CompressedReduceScatter(PlainBuffers, ReduceScatter):
    """The reduce-scatter of one piece, through the compressor's codec.

    Every call begins with one small all-reduce: of what is never compressed, and of whether any rank's gradients are
    not finite. If so all ranks get NaN, as without compression, and error feedback is unchanged.
    """

    def __init__(
        self,
        name: str,
        param_shards: Sequence[ParamShard],
        compressor: GradientCompressor,
        tally: CommTally,
        note: Callable[[], None],
    ) -> None:
        """`note` is called before each reduction."""
        self._note = note
        self._name = name
        self._segments = param_shards
        self._compressor = compressor
        self._tally = tally

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._note()
        started = time.monotonic()
        rows = input_tensor.view(group.size(), -1)
        param_shards = param_shards_of(rows.shape[1], self._segments, self._name)
        numels = [param_shard.numel for param_shard in param_shards]
        is_small = [
            self._compressor.travels_dense(param_shard.name, param_shard.numel * group.size())
            for param_shard in param_shards
        ]
        columns, outputs = torch.split(rows, numels, dim=1), torch.split(output_tensor, numels)
        small = _Columns.of(columns, outputs, is_small, rows)
        large = _Columns.of(columns, outputs, [not one for one in is_small], rows)
        names = [param_shard.name for param_shard, one in zip(param_shards, is_small, strict=True) if not one]
        wire_bytes = self._reduce(small, large, names, group)
        if op == dist.ReduceOp.SUM:  # FSDP2 divides afterwards, because fp16 could overflow
            output_tensor.mul_(group.size())
        self._tally.add_reduction(
            started, num_bytes=input_tensor.nbytes, codec=self._compressor.codec.name, wire_bytes=wire_bytes
        )
        return None

    @torch.no_grad()
    def _reduce(self, small: _Columns, large: _Columns, names: list[str], group: dist.ProcessGroup) -> int:
        compressor, feedback = self._compressor, self._compressor.feedback
        layout: FlatLayout = (FlatEntry(f"{self._name}/{stream_of(names)}", large.numel),)
        gradient = large.rows().reshape(-1)
        flags = gradient.new_tensor([not is_finite(gradient), compressor.has_foreign_state])
        head = torch.cat([small.rows().reshape(-1), flags])
        all_reduce(head, group=group)
        is_bad, is_foreign = (number > 0 for number in head[-2:].tolist())
        small.put(head[:-2].view(group.size(), -1)[group.rank()] / group.size())
        wire_bytes = 2 * head.nbytes
        if not large.columns:
            return wire_bytes
        if compressor.is_dense_step or is_foreign:
            return wire_bytes + self._reduce_dense(gradient, large, layout, group)
        if is_bad:
            large.put(gradient.new_full((large.numel // group.size(),), float("nan")))
            return wire_bytes
        x = feedback.prepare(layout, [gradient])
        averaged = scattered_mean(compressor.codec, x, group, compressor.key(names))
        large.put(dense(feedback.accept(layout, x, averaged.sent_vector, averaged.mean_vector)))
        return wire_bytes + averaged.num_bytes

    def _reduce_dense(self, x: Tensor, large: _Columns, layout: FlatLayout, group: dist.ProcessGroup) -> int:
        """Reduce uncompressed, with what was carried over: during warm-up, and between compressed steps."""
        feedback = self._compressor.feedback
        carried = feedback.carried(layout, x.device)
        if carried is not None:
            x += carried
        mean = x.new_empty(x.numel() // group.size())
        reduce_scatter(mean, x, op=dist.ReduceOp.SUM, group=group)
        large.put(mean.div_(group.size()))
        if carried is not None:
            feedback.accept_dense(layout, x, mean)
        return x.nbytes * (group.size() - 1) // group.size()


class _Columns(NamedTuple):
    """Some of a piece's columns, and the outputs for this rank's shard of their mean."""

    columns: list[Tensor]
    outputs: list[Tensor]
    whole: Tensor

    @classmethod
    def of(
        cls, columns: Sequence[Tensor], outputs: Sequence[Tensor], wanted: Sequence[bool], whole: Tensor
    ) -> _Columns:
        return cls(
            [column for column, is_in in zip(columns, wanted, strict=True) if is_in],
            [output for output, is_in in zip(outputs, wanted, strict=True) if is_in],
            whole,
        )

    @property
    def numel(self) -> int:
        return sum(column.numel() for column in self.columns)

    def rows(self) -> Tensor:
        """A copy in fp32, with one row per owner."""
        if not self.columns:
            return self.whole.new_empty(0, dtype=torch.float32)
        return torch.cat([column.float() for column in self.columns], dim=1)

    def put(self, shard: Tensor) -> None:
        for output, value in zip(self.outputs, torch.split(shard, [one.numel() for one in self.outputs]), strict=True):
            output.copy_(value)


def replica_average(
    name: str,
    param_shards: Sequence[ParamShard],
    compressor: GradientCompressor,
    group: dist.ProcessGroup,
    tally: CommTally,
) -> Callable[[Tensor], None]:
    """The hook FSDP2 calls after a reduce-scatter: averages the shard over the replicas, encoded, in place."""

    def average(shard: Tensor) -> None:
        started = time.monotonic()
        found = param_shards_of(shard.numel(), param_shards, name)
        parts = torch.split(shard, [param_shard.numel for param_shard in found])
        views = [part.view(param_shard.shape) for part, param_shard in zip(parts, found, strict=True)]
        wire_bytes = average_named(compressor, [param_shard.name for param_shard in found], views, group)
        tally.add_reduction(started, num_bytes=shard.nbytes, codec=compressor.codec.name, wire_bytes=wire_bytes)

    return average


class EncodedAllGather(PlainBuffers, AllGather):
    """Gathers parameters in fewer bytes: every rank computes with the decoded values, also of its own shard.

    The shards that the optimizer updates stay exact.
    """

    def __init__(self, method: str, stream: int, tally: CommTally, note: Callable[[], None]) -> None:
        """`note` is called when the shards have been read."""
        self._note = note
        codec = make_codec(method)
        assert isinstance(codec, DenseCodec), "fsdp.gather_codec allows no other"
        self._codec = codec
        self._key = Key(stream=stream)
        self._tally = tally

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._note()
        self._tally.num_gathers += 1
        started = time.monotonic()
        if input_tensor.dtype == torch.uint8:  # parameters of several dtypes, as bytes
            gather(output_tensor, input_tensor, group=group)
        else:
            key = self._key._replace(step=self._tally.num_gathers)
            output_tensor.copy_(all_gather_encoded(self._codec, input_tensor.float(), group, key))
        self._tally.add(started)
        return None
