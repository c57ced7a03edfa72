"""Compression under FSDP2: encoded gradients in its reduce-scatter slot, or between replicas of shards, with feedback.

Over one shard axis every rank encodes its part of the gradient for each owner; error feedback then keeps what was left
out of the whole piece: as many bytes as its gradient in fp32. Where there are replicas of shards (mesh.dp), they are
what lies across the slow link: shards are reduced as they are, and their means travel encoded between the replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from typing_extensions import override

from torsh_distributed.comm.collectives.tensors import all_reduce
from torsh_distributed.compress.averaging.exchange import all_gather_encoded
from torsh_distributed.compress.averaging.named_buffers import FlatEntry, FlatLayout
from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.averaging.scatter import scattered_mean
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.compress.messages.compressed_gradient import is_finite
from torsh_distributed.compress.messages.sparse import dense
from torsh_distributed.compress.policy import stream_of
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.sharded.communication import CommTally, Empty, gather, reduce_scatter
from torsh_distributed.plan import CompressConfig

_NEEDS_WHOLE = ("powersgd", "sketch")
"""Methods whose messages are about a tensor as a whole: they cannot be cut by owner."""


class Segment(NamedTuple):
    """One parameter's part of a rank's shard of a piece."""

    name: str
    shape: tuple[int, ...]
    """Rows that a rank owns, padded to equal counts, and the parameter's other dims."""

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()


def check_method(config: CompressConfig, *, has_replicas: bool) -> None:
    """Refuse what does not go with shards, before anything is built."""
    if not has_replicas and config.name in _NEEDS_WHOLE:
        raise ConfigurationError(
            f"compress.method {config.name!r} needs whole gradients, which a shard axis does not have",
            hint="choose int8, topk or another method for elements, or add replicas (mesh.dp above 1)",
        )
    if not has_replicas and config.error_feedback == "ef21":
        raise ConfigurationError(
            "compress.error_feedback 'ef21' needs whole gradients, which a shard axis does not have",
            hint='set it to "ef14", or add replicas (mesh.dp above 1)',
        )


def segments_of(numel: int, known: Sequence[Segment], name: str) -> Sequence[Segment]:
    """The segments of a shard of `numel` elements; one for all where parameters without a gradient are left out."""
    return known if sum(segment.numel for segment in known) == numel else [Segment(name, (numel,))]


class CompressedReduceScatter(Empty, ReduceScatter):
    """The reduce-scatter of one piece, through the compressor's codec.

    Every call begins with one small all-reduce: what is never compressed, and whether some rank's gradients are not
    finite. If so all ranks get NaN, as they would without compression, and nothing is remembered.
    """

    def __init__(
        self, name: str, segments: Sequence[Segment], compressor: GradientCompressor, tally: CommTally
    ) -> None:
        self._name = name
        self._segments = segments
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
        started = time.monotonic()
        rows = input_tensor.view(group.size(), -1)
        segments = segments_of(rows.shape[1], self._segments, self._name)
        numels = [segment.numel for segment in segments]
        is_small = [self._compressor.travels_dense(segment.name, segment.numel * group.size()) for segment in segments]
        columns, outputs = torch.split(rows, numels, dim=1), torch.split(output_tensor, numels)
        small = _Part.of(columns, outputs, is_small, rows)
        large = _Part.of(columns, outputs, [not one for one in is_small], rows)
        names = [segment.name for segment, one in zip(segments, is_small, strict=True) if not one]
        wire_bytes = self._reduce(small, large, names, group)
        if op == dist.ReduceOp.SUM:  # FSDP2 divides by itself then: fp16 could overflow in between
            output_tensor.mul_(group.size())
        self._tally.add_reduction(
            started, num_bytes=input_tensor.nbytes, codec=self._compressor.codec.name, wire_bytes=wire_bytes
        )
        return None

    @torch.no_grad()
    def _reduce(self, small: _Part, large: _Part, names: list[str], group: dist.ProcessGroup) -> int:
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

    def _reduce_dense(self, x: Tensor, large: _Part, layout: FlatLayout, group: dist.ProcessGroup) -> int:
        """As it is, with what was carried over: during warm-up, and between compressed steps."""
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


class _Part(NamedTuple):
    """Some of a piece's columns, and where this rank's shard of their mean goes."""

    columns: list[Tensor]
    outputs: list[Tensor]
    whole: Tensor

    @classmethod
    def of(cls, columns: Sequence[Tensor], outputs: Sequence[Tensor], wanted: Sequence[bool], whole: Tensor) -> _Part:
        return cls(
            [column for column, is_in in zip(columns, wanted, strict=True) if is_in],
            [output for output, is_in in zip(outputs, wanted, strict=True) if is_in],
            whole,
        )

    @property
    def numel(self) -> int:
        return sum(column.numel() for column in self.columns)

    def rows(self) -> Tensor:
        """A copy in fp32: one row for each owner."""
        if not self.columns:
            return self.whole.new_empty(0, dtype=torch.float32)
        return torch.cat([column.float() for column in self.columns], dim=1)

    def put(self, shard: Tensor) -> None:
        for output, value in zip(self.outputs, torch.split(shard, [one.numel() for one in self.outputs]), strict=True):
            output.copy_(value)


def replica_average(
    name: str, segments: Sequence[Segment], compressor: GradientCompressor, group: dist.ProcessGroup, tally: CommTally
) -> Callable[[Tensor], None]:
    """What FSDP2 calls after the reduce-scatter of a piece: its shard averaged over the replicas, encoded, in place."""

    def average(shard: Tensor) -> None:
        started = time.monotonic()
        found = segments_of(shard.numel(), segments, name)
        parts = torch.split(shard, [segment.numel for segment in found])
        views = [part.view(segment.shape) for part, segment in zip(parts, found, strict=True)]
        wire_bytes = average_named(compressor, [segment.name for segment in found], views, group)
        tally.add_reduction(started, num_bytes=shard.nbytes, codec=compressor.codec.name, wire_bytes=wire_bytes)

    return average


class EncodedAllGather(Empty, AllGather):
    """Parameters gathered in fewer bytes: every rank computes with what the messages say, its own shard included.

    The shards that the optimizer updates stay exact.
    """

    def __init__(self, method: str, stream: int, tally: CommTally) -> None:
        codec = make_codec(method)
        assert isinstance(codec, DenseCodec), "fsdp.gather_codec allows no other"
        self._codec = codec
        self._key = Key(stream=stream)
        self._tally = tally

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._tally.num_gathers += 1
        started = time.monotonic()
        if input_tensor.dtype == torch.uint8:  # parameters of several dtypes, as bytes
            gather(output_tensor, input_tensor, group=group)
        else:
            key = self._key._replace(step=self._tally.num_gathers)
            output_tensor.copy_(all_gather_encoded(self._codec, input_tensor.float(), group, key))
        self._tally.add(started)
        return None
