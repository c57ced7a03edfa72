"""Averages gradients over the ranks, bucket by bucket: in DDP's hook, and in manual mode."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future, collect_all
from torch.utils.hooks import RemovableHandle

from torsh_distributed import events
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.shared_memory.buffers import fails_cleanly
from torsh_distributed.compress.averaging.background import BackgroundExecutor
from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.compress.messages.compressed_gradient import DENSE
from torsh_distributed.errors import CommunicationError, InvalidArgument, TensorShapeMismatch, TorshError
from torsh_distributed.events import step_notes
from torsh_distributed.parallel.data.bucket_clock import BucketClock
from torsh_distributed.parallel.data.bucket_reduction import Reduce, SharedBuckets
from torsh_distributed.parallel.torch_internals import _current_graph_task_id

_NONE, _DENSE, _SPARSE = 0.0, 1.0, 2.0

GradientHook = Callable[[str, Tensor], Tensor | None]
"""Takes a parameter's name and this rank's gradient; what it returns, unless None, replaces the gradient."""


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """A bucket as it was sent last."""

    index: int
    size_mb: float
    parameter_names: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """How many parameters it holds."""
        return len(self.parameter_names)


@dataclass(frozen=True, kw_only=True)
class BucketOutcomes:
    """What became of the buckets of a backward that raised: averaged, or as they were on this rank alone."""

    names: Mapping[int, tuple[str, ...]]
    """The parameters in each."""
    averaged: frozenset[int]


@dataclass(frozen=True)
class _FullBucket:
    """A bucket whose gradients are all computed."""

    index: int
    is_last: bool
    buffer: Tensor
    names: tuple[str, ...]
    gradients: list[Tensor]
    """Views of the buffer; empty where only the whole buffer is needed."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


class GradientSync:
    """Averages buckets, as the plan says or through a compressor in the background.

    `is_mean` says that `reduce` computes means; otherwise it computes sums, of gradients that are divided first.

    No failure is lost in a thread: a failed bucket is filled with NaN, and the error is raised when backward ends. With
    `keeps_failed` it is left as it is instead, for somebody who takes its gradients from there.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        group: dist.ProcessGroup,
        reduce: Reduce,
        *,
        is_mean: bool,
        device: torch.device,
        dtype: torch.dtype | None,
        overlap: bool,
        is_bucketed: bool,
    ) -> None:
        self._names = names
        self._group = group
        self._reduce = reduce
        self._is_mean = is_mean
        self._device = device
        self._dtype = dtype
        self._overlap = overlap
        self._compressor: GradientCompressor | None = None
        self._pipeline: BackgroundExecutor | None = None
        self._hooks: OrderedDict[int, GradientHook] = OrderedDict()
        self._errors: list[BaseException] = []
        self._held: list[tuple[_FullBucket, Future[Tensor]]] = []
        self._travelling: list[Future[Tensor]] = []
        self._watched = -1
        self._buckets: SharedBuckets | None = None
        self._infos: dict[int, BucketInfo] = {}
        self._layout: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        self.is_bucketed = is_bucketed
        self.keeps_failed = False
        self._averaged: set[int] = set()
        self._failed: set[int] = set()
        self.has_pending = False
        """Whether backward left gradients that are not averaged yet."""
        self.is_sent = True
        """Whether the last bucket of a backward has been sent, since somebody said that it was not."""
        self.clock = BucketClock()

    def rename(self, names: Mapping[int, str]) -> None:
        """Other parameters are trained, by `id`; their buckets are built again after it."""
        self._names = names
        self._infos, self._layout = {}, {}

    @property
    def compressor(self) -> GradientCompressor | None:
        """What compresses gradients; None without compression."""
        return self._compressor

    def compress_with(self, compressor: GradientCompressor | None) -> None:
        """Send gradients through `compressor` from the next step on, or uncompressed; every rank calls this."""
        if compressor is not None:
            if compressor.group is not self._group:
                compressor.use_group(self._group)
            if self._pipeline is None:
                self._pipeline = BackgroundExecutor(self._group, self._device)
        self._compressor = compressor

    def share_buckets(self, is_wanted: bool) -> None:
        """Move buckets into memory that the ranks share, if they do; or leave them where they are."""
        self._buckets = SharedBuckets(self._group) if is_wanted else None

    def add_hook(self, hook: GradientHook) -> RemovableHandle:
        """Call `hook` on every gradient of this rank before it is averaged."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    @property
    def num_hooks(self) -> int:
        """How many hooks are registered."""
        return len(self._hooks)

    def adopt_hooks(self, other: "GradientSync") -> None:
        """Call the hooks of `other` too; their handles still remove them."""
        self._hooks = other._hooks

    def bucket_info(self) -> list[BucketInfo]:
        """The buckets of the last backward, in the order they were sent."""
        return [self._infos[index] for index in sorted(self._infos)]

    def bucket_outcomes(self) -> BucketOutcomes | None:
        """After a backward that raised: which buckets are averaged; None unless all others are untouched.

        Nor where gradients were changed on the way into a bucket: by a hook, a codec, a cast or a division.
        """
        is_plain = self._is_mean and self.is_bucketed and self._dtype is None and not self._hooks
        known = len(self._averaged) + len(self._failed)
        if not (self.keeps_failed and is_plain and self._compressor is None) or known != len(self._infos):
            return None
        if self._failed and not fails_cleanly(self._group):
            return None
        names = {index: info.parameter_names for index, info in self._infos.items()}
        return BucketOutcomes(names=names, averaged=frozenset(self._averaged))

    # --- in backward ------------------------------------------------------------------------------------------

    def start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket that is complete on this rank; the future holds its buffer and never fails."""
        self._watch_backward()
        # On a GPU this runs while the device waits for kernels: do not create unused views.
        is_whole = self.is_bucketed and not self._hooks and self._compressor is None
        full = _FullBucket(
            bucket.index(),
            bucket.is_last(),
            bucket.buffer(),
            self._names_in(bucket),
            [] if is_whole else bucket.gradients(),
        )
        self._note(full)
        if full.index == 0:
            self._averaged, self._failed = set(), set()
        if self._hooks:
            self._call_hooks(full.names, full.gradients)
        if self._overlap:
            return self._awaited(self._launch(full))
        whole: Future[Tensor] = self._awaited(Future(devices=self._devices))
        self._held.append((full, whole))
        if full.is_last:
            held, self._held = self._held, []
            for each, result in held:
                self._launch(each).then(_forward_to(result))
        return whole

    def _names_in(self, bucket: dist.GradBucket) -> tuple[str, ...]:
        ids = tuple(map(id, bucket.parameters()))
        known = self._layout.get(bucket.index())
        if known is None or known[0] != ids:  # DDP rebuilds its buckets after the first backward
            known = self._layout[bucket.index()] = (ids, tuple(self._names[one] for one in ids))
        return known[1]

    def _note(self, full: _FullBucket) -> None:
        info = self._infos.get(full.index)
        if info is None or info.parameter_names is not full.names:
            self._infos[full.index] = BucketInfo(
                index=full.index, size_mb=full.num_bytes / 2**20, parameter_names=full.names
            )
        if full.is_last:
            self._infos = {index: info for index, info in self._infos.items() if index <= full.index}
            self.clock.note_ready()
            self.has_pending, self.is_sent = False, True

    def _call_hooks(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        for hook in list(self._hooks.values()):
            for name, gradient in zip(names, gradients, strict=True):
                changed = hook(name, gradient)
                if changed is None:
                    continue
                if changed.shape != gradient.shape:
                    raise TensorShapeMismatch(
                        f"the gradient hook changed the shape of the gradient of {name}",
                        hint="return a gradient of the same shape, or None to keep it",
                        expected=tuple(gradient.shape),
                        returned=tuple(changed.shape),
                    )
                gradient.copy_(changed)

    def _launch(self, full: _FullBucket) -> Future[Tensor]:
        if self._compressor is not None:
            return self._start_compressed(full, self._compressor)
        if self._group.size() == 1:  # it already is the mean
            alone: Future[Tensor] = Future(devices=self._devices)
            alone.set_result(full.buffer)
            return alone
        try:
            return self._start_sum(full)
        except TorshError as error:  # refused at once: the group was aborted
            self._errors.append(error)
            failed: Future[Tensor] = Future(devices=self._devices)
            self._failed.add(full.index)
            failed.set_result(full.buffer if self.keeps_failed else full.buffer.fill_(float("nan")))
            return failed

    def _start_sum(self, full: _FullBucket) -> Future[Tensor]:
        """DDP's own averaging: divide, then sum; or both in one pass where the backend can."""
        # The callback must not reference the group: it runs on the backend's thread, where the group must not be freed.
        clock, errors, buffer, index = self.clock, self._errors, full.buffer, full.index
        num_bytes, keeps_failed = full.num_bytes, self.keeps_failed
        averaged, failed = self._averaged, self._failed
        if self._buckets is not None and self.is_bucketed and self._dtype is None:
            self._buckets.settle(index, buffer, is_last=full.is_last)
        if not self._is_mean:
            buffer.div_(self._group.size())
        parts = [buffer] if self.is_bucketed else torch.split(buffer, [part.numel() for part in full.gradients])
        sent = [part if self._dtype is None else part.to(self._dtype) for part in parts]
        start = time.monotonic()
        sums = [self._reduce(part) for part in sent]

        def finish(_: Future[Any]) -> Tensor:
            try:
                for part, summed in zip(parts, sums, strict=True):
                    value = summed.value()
                    if value is not part:
                        part.copy_(value.view_as(part))
            except (TorshError, RuntimeError) as error:
                errors.append(_as_ours(error))
                failed.add(index)
                return buffer if keeps_failed else buffer.fill_(float("nan"))
            averaged.add(index)
            clock.add(index, num_bytes, start, codec=None, wire_bytes=None)
            return buffer

        if len(sums) == 1:
            return sums[0].then(finish)
        return collect_all(sums).then(finish)

    def _start_compressed(self, full: _FullBucket, compressor: GradientCompressor) -> Future[Tensor]:
        assert self._pipeline is not None, "compress_with made it"
        result: Future[Tensor] = Future(devices=self._devices)

        def average(group: dist.ProcessGroup) -> None:
            start = time.monotonic()
            wire_bytes = average_named(compressor, full.names, full.gradients, group, bucket=full.buffer)
            codec = DENSE if compressor.is_dense_step else compressor.config.method
            if full.is_last:
                compressor.step()
            self.clock.add(full.index, full.num_bytes, start, codec=codec, wire_bytes=wire_bytes)

        def finish(error: BaseException | None) -> None:
            try:
                if error is not None:
                    self._errors.append(error)
                    full.buffer.fill_(float("nan"))
            finally:  # backward must never wait forever
                result.set_result(full.buffer)

        self._pipeline.submit(average, finish)
        return result

    def _watch_backward(self) -> None:
        """Make sure errors are raised, unchanged, at the end of the current backward.

        Not through the futures: an exception that passes through C++ becomes a RuntimeError with its text.
        """
        task = _current_graph_task_id()
        if task in (-1, self._watched):
            return
        self._watched = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end_computing)

    def _awaited(self, bucket: Future[Tensor]) -> Future[Tensor]:
        """Note a bucket to be waited for before the reducer does, if waits are timed: its own wait cannot be."""
        is_in_backward = _current_graph_task_id() != -1
        if is_in_backward and self._device.type == "cpu" and step_notes.wants_waits():
            self._travelling.append(bucket)
        return bucket

    def _end_computing(self) -> None:
        """Backward has computed all gradients; next the reducer finalizes, which waits for all buckets."""
        # That was queued after this callback, so the end of backward is queued from here.
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        travelling, self._travelling = self._travelling, []
        if travelling:
            with events.waiting("average gradients", self._group.group_name):
                for bucket in travelling:
                    bucket.wait()

    def end_backward(self) -> None:
        """All buckets are averaged: raise the first error, if any."""
        self.clock.end_step()
        errors, self._errors[:] = list(self._errors), []
        if errors:
            raise errors[0]

    @property
    def _devices(self) -> list[int | str | torch.device] | None:
        return None if self._device.type == "cpu" else [self._device]

    # --- by hand ----------------------------------------------------------------------------------------------

    def sync_now(self, named: Mapping[str, Tensor], *, max_bytes: int) -> None:
        """Average gradients in place, after backward; every rank gives the same names in the same order."""
        self._call_hooks(list(named), list(named.values()))
        compressor = self._compressor
        if compressor is not None:
            assert self._pipeline is not None, "compress_with made it"
            buckets = [(list(bucket), list(bucket.values())) for bucket in _packed(named, max_bytes)]

            def average(group: dist.ProcessGroup) -> None:
                for names, tensors in buckets:
                    average_named(compressor, names, tensors, group)
                compressor.step()

            self._pipeline.run(average)
        else:
            for bucket in _packed(named, max_bytes if self.is_bucketed else 1):
                self._sum_now(list(bucket.values()))
        self.has_pending = False

    def _sum_now(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        if not self._is_mean:
            flat.div_(self._group.size())
        summed = self._reduce(flat if self._dtype is None else flat.to(self._dtype)).wait()
        for tensor, part in zip(tensors, torch.split(summed, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def gradients_held(params: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The gradients that any rank of the group has, the last layers first, in the order of backward.

    A rank without one takes part with zeros; if no rank has one it stays None, so the optimizer skips the parameter. A
    sparse gradient on any rank raises on all. Every rank of the group calls this.
    """
    if not params:
        return {}
    device = next(iter(params.values())).device
    held = torch.tensor([_kind(param.grad) for param in params.values()], device=device)
    all_reduce(held, "max", group=group)
    sparse = [name for name, kind in zip(params, held.tolist(), strict=True) if kind == _SPARSE]
    if sparse:
        raise InvalidArgument(
            f"sparse gradients cannot be averaged by hand: {', '.join(sparse)}",
            hint="build these modules with sparse=False, or let backward average: leave out no_sync()",
            parameters=sparse,
        )
    found: dict[str, Tensor] = {}
    for (name, param), is_held in reversed(list(zip(params.items(), held.tolist(), strict=True))):
        if is_held:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            found[name] = param.grad
    return found


def _kind(gradient: Tensor | None) -> float:
    """The kind of a gradient as a number; over the ranks the largest wins."""
    if gradient is None:
        return _NONE
    return _DENSE if gradient.layout is torch.strided else _SPARSE


def average_bucket(state: GradientSync, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook that DDP calls when a bucket is full."""
    return state.start(bucket)


def _as_ours(error: Exception) -> TorshError:
    """An error that passed through a future: C++ keeps only its text."""
    if isinstance(error, TorshError):
        return error
    text = str(error).removeprefix("Got the following error when running the callback: ")
    ours = CommunicationError(
        f"gradients could not be averaged: {(text.splitlines() or [type(error).__name__])[0]}",
        hint="look at the first rank that failed; the gradients of this step are invalid",
    )
    ours.__cause__ = error
    return ours


def _forward_to(result: Future[Tensor]) -> Callable[[Future[Tensor]], None]:
    return lambda done: result.set_result(done.value())


def _packed(named: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in buckets of one dtype of at most `max_bytes`, or of one tensor."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + num_bytes > max_bytes or tensor.dtype != next(iter(bucket.values())).dtype):
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += num_bytes
    if bucket:
        yield bucket
