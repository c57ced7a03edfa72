"""The mean of named gradients over a group: small ones uncompressed, in one buffer; the rest through the codec.

Every average begins with one all-reduce that carries, beside the small gradients, what the ranks must agree on before
they compress: whether any rank's gradients hold NaN or infinity or cannot be compressed, whether any rank's state does
not match the others', and whether all are at the same step. So all ranks see what is wrong on one, for 20 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed import events
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.compress.codecs.auto import AutoCodec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.compressor_state import CompressorState
from torsh_distributed.compress.messages.compressed_gradient import check_dense, is_finite, norm, num_bytes
from torsh_distributed.compress.messages.sparse import Vector, dense
from torsh_distributed.compress.named_buffers import FlatEntry, FlatLayout, split
from torsh_distributed.errors import InvalidArgument

_STEP_MODULUS = 64  # its square, summed over a thousand ranks, is still exact in fp32
_MEASURE_EVERY = 10  # steps: two more passes over the gradients cost too much at every one


class _FlatGradients(NamedTuple):
    """Gradients that travel as one flat tensor: its layout, and the tensors themselves."""

    layout: FlatLayout
    tensors: list[Tensor]

    def flat(self, *, room: int = 0, device: torch.device | None = None) -> Tensor:
        """A copy of all of them, one after the other, with `room` for more elements at the end.

        In fp32, which codecs take and in which halves are summed; in fp64 if one of them is fp64.
        """
        numel = sum(entry.numel for entry in self.layout)
        is_wide = any(tensor.dtype == torch.float64 for tensor in self.tensors)
        flat = torch.empty(
            numel + room,
            dtype=torch.float64 if is_wide else torch.float32,
            device=self.tensors[0].device if self.tensors else device,
        )
        for place, tensor in zip(split(flat[:numel], self.layout), self.tensors, strict=True):
            place.view(tensor.shape).copy_(tensor)
        return flat

    def put_back(self, vector: Vector) -> None:
        """Copy the parts of a vector back into the tensors."""
        if not isinstance(vector, Tensor) and all(map(_is_plain, self.tensors)):
            vector.write_to(self.tensors)
            return
        for value, tensor in zip(split(dense(vector), self.layout), self.tensors, strict=True):
            tensor.copy_(value.view(tensor.shape))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


class _Agreed(NamedTuple):
    """What the ranks found before they compress: the same on all of them."""

    is_finite: bool
    must_start_over: bool
    """Some rank's state does not match the others': everything travels uncompressed once, after which it does."""


@torch.no_grad()
def average_named(
    compressor: CompressorState,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    bucket: Tensor | None = None,
) -> int:
    """Replace each tensor by its mean over the ranks, in place; every rank calls this with the same names in order.

    Returns the bytes this rank sent. If any rank's tensors hold NaN or infinity, the compressed ones become NaN on
    every rank and nothing is remembered: as without compression, a loss scaler sees it everywhere and skips the step.
    `bucket` is the memory that the tensors fill. Where the codec measured that compression does not pay, the bucket is
    averaged in place.
    """
    if not tensors:
        return 0
    compressor.announce_warm_up()
    started = time.perf_counter()
    small, large, refusal = _parted(compressor, names, tensors)
    is_dense = compressor.is_dense_step
    auto = None if is_dense or not large.tensors else _choosing(compressor)
    if auto is not None and auto.sends_as_it_is(_key(compressor, large)):
        is_dense = True
        if bucket is not None and compressor.feedback.carried(large.layout, bucket.device) is None:
            _all_reduce_mean(bucket, group)
            auto.note(_key(compressor, large), time.perf_counter() - started, group)
            return _counted(compressor, small, large, is_dense, ring_bytes(num_bytes(bucket), group), group, started)
    agreed, sent_bytes = _agree_and_average_small(compressor, small, large, group, refusal)
    if not agreed.is_finite:
        compressor.stats.num_nonfinite += 1
    if agreed.must_start_over:
        compressor.reset_codec()
    if agreed.must_start_over or is_dense:
        sent_bytes += _average_dense(compressor, large, group)
    elif not agreed.is_finite:
        for tensor in large.tensors:
            tensor.fill_(float("nan"))
    elif large.tensors:
        sent_bytes += _average_compressed(compressor, large, group)
    if auto is not None and agreed.is_finite and not agreed.must_start_over:
        auto.note(_key(compressor, large), time.perf_counter() - started, group)
    return _counted(compressor, small, large, is_dense, sent_bytes, group, started)


def _choosing(compressor: CompressorState) -> AutoCodec | None:
    """The codec if it is one that chooses by timing averages, and if what it measured is valid."""
    codec = compressor.codec
    return codec if isinstance(codec, AutoCodec) and not compressor.has_foreign_state else None


def _key(compressor: CompressorState, large: _FlatGradients) -> Key:
    return compressor.key([entry.name for entry in large.layout])


def _counted(
    compressor: CompressorState,
    small: _FlatGradients,
    large: _FlatGradients,
    is_dense: bool,
    sent_bytes: int,
    group: dist.ProcessGroup,
    started: float,
) -> int:
    """Add an average to the totals; returns the bytes sent."""
    stats = compressor.stats
    stats.num_dense += len(small.tensors) + (len(large.tensors) if is_dense else 0)
    stats.num_tensors += 0 if is_dense else len(large.tensors)
    stats.bytes_before += ring_bytes(sum(map(num_bytes, small.tensors + large.tensors)), group)
    stats.bytes_on_wire += sent_bytes
    stats.exchange_s += time.perf_counter() - started
    return sent_bytes


def _parted(
    compressor: CompressorState, names: Sequence[str], tensors: Sequence[Tensor]
) -> tuple[_FlatGradients, _FlatGradients, InvalidArgument | None]:
    """What is never compressed, what is, and the error of the first tensor that cannot be averaged, if there is one.

    The error is raised after the first exchange, in which zeros replace that tensor: the other ranks would wait forever
    if this rank raised before it.
    """
    entries: tuple[list[FlatEntry], list[FlatEntry]] = ([], [])
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    refusal: InvalidArgument | None = None
    for name, tensor in zip(names, tensors, strict=True):
        taken = tensor
        try:
            check_dense(name, tensor)
        except InvalidArgument as error:
            refusal = refusal or error
            taken = torch.zeros(tensor.shape, device=tensor.device)
        is_large = not compressor.travels_dense(name, tensor.numel())
        entries[is_large].append(FlatEntry(name, tensor.numel()))
        parts[is_large].append(taken)
    return _FlatGradients(tuple(entries[0]), parts[0]), _FlatGradients(tuple(entries[1]), parts[1]), refusal


def _refused(refusal: InvalidArgument | None, group: dist.ProcessGroup) -> InvalidArgument:
    """What every rank raises when some cannot average their tensors: the first one's reason, and which ranks."""
    mine = None if refusal is None else {"message": refusal.message, "hint": refusal.hint}
    everyone = zip(dist.get_process_group_ranks(group), all_gather_object(mine, group=group), strict=True)
    reasons = {rank: reason for rank, reason in everyone if reason is not None}
    first = next(iter(reasons.values()))
    return InvalidArgument(first["message"], hint=first["hint"], ranks=list(reasons))


def _agree_and_average_small(
    compressor: CompressorState,
    small: _FlatGradients,
    large: _FlatGradients,
    group: dist.ProcessGroup,
    refusal: InvalidArgument | None,
) -> tuple[_Agreed, int]:
    """One all-reduce: the small gradients, and five numbers to agree on. Nothing has changed if it raises."""
    feedback, num_ranks = compressor.feedback, group.size()
    buffer = small.flat(room=5, device=(small.tensors + large.tensors)[0].device)
    values, extra = buffer[:-5], buffer[-5:]
    # Not None only if a tensor was compressed before the settings changed.
    carried = feedback.carried(small.layout, values.device)
    if carried is not None:
        values.add_(carried)
    is_good = is_finite(values) and all(map(is_finite, large.tensors))
    step = compressor.num_steps % _STEP_MODULUS
    flags = [float(not is_good), float(compressor.has_foreign_state), float(refusal is not None)]
    extra.copy_(torch.tensor([*flags, step, step * step]))
    all_reduce(buffer, group=group)
    num_bad, num_foreign, num_refused, steps, squares = (int(number) for number in extra.tolist())
    if num_refused:
        raise _refused(refusal, group)
    has_one_step = num_ranks * squares == steps * steps  # equal only if all summands are
    if not has_one_step:
        _catch_up(compressor, group, values.device)
    values.div_(num_ranks)
    small.put_back(values)
    if num_bad == 0 and carried is not None:
        feedback.accept_dense(small.layout, values, values)
    return _Agreed(num_bad == 0, num_foreign > 0 or not has_one_step), ring_bytes(num_bytes(buffer), group)


def _catch_up(compressor: CompressorState, group: dist.ProcessGroup, device: torch.device) -> None:
    """Continue from the furthest step that any rank has seen: some loaded their state and others had none."""
    furthest = torch.tensor(compressor.num_steps, dtype=torch.float64, device=device)
    all_reduce(furthest, "max", group=group)
    events.emit(
        events.AlertEvent(
            severity="warning",
            name="compression_out_of_step",
            message=f"the ranks were at different steps of compression: this one at {compressor.num_steps}, the"
            f" furthest at {int(furthest)}; all continue from there, with the codec's state reset",
        )
    )
    compressor.num_steps = int(furthest)


def _average_dense(compressor: CompressorState, large: _FlatGradients, group: dist.ProcessGroup) -> int:
    """Whole gradients with their residuals; afterwards the ranks' states match."""
    if not large.tensors:
        return 0
    feedback = compressor.feedback
    mean = large.flat()
    own = mean.float().clone() if feedback.is_shared else mean
    carried = feedback.carried(large.layout, mean.device)
    if carried is not None:
        mean.add_(carried)
    _all_reduce_mean(mean, group)
    large.put_back(mean)
    if (feedback.is_shared or carried is not None) and is_finite(mean):
        feedback.accept_dense(large.layout, own, mean)
    return ring_bytes(num_bytes(mean), group)


def _average_compressed(compressor: CompressorState, large: _FlatGradients, group: dist.ProcessGroup) -> int:
    feedback, stats = compressor.feedback, compressor.stats
    key = _key(compressor, large)
    compressor.set_shapes(key.stream, [tuple(tensor.shape) for tensor in large.tensors])
    x = feedback.prepare(large.layout, large.tensors)
    averaged = compressor.codec.average(x, group, key)
    mean, sent = averaged.mean_vector, averaged.sent_vector
    if not is_finite(mean):  # too large for the codec's type: the same on all ranks, and nothing is remembered
        stats.num_nonfinite += 1
        feedback.abandon(large.layout)
        large.put_back(mean)
        return averaged.num_bytes
    if stats.error_norm is None or compressor.num_steps % _MEASURE_EVERY == 0:
        stats.error_norm, stats.original_norm = norm(x - dense(sent)), norm(x)
    large.put_back(feedback.accept(large.layout, x, sent, mean))
    return averaged.num_bytes


def _all_reduce_mean(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """The mean over the ranks, in place. Halves are divided before they are added: their sum might be too large."""
    if buffer.dtype.itemsize < 4:
        all_reduce(buffer.div_(group.size()), group=group)
    else:
        all_reduce(buffer, "mean", group=group)


def ring_bytes(size_bytes: int, group: dist.ProcessGroup) -> int:
    """What a rank sends in a ring all-reduce, which is the least an all-reduce needs."""
    return 2 * (group.size() - 1) * size_bytes // group.size()
