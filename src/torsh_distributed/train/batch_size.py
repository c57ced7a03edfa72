"""Finds how many samples fit: microbatch and accumulation for a batch size, from trial steps that measure memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed import upward
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument, MemoryAllocationFailed
from torsh_distributed.observe.torch_internals import TorchDispatchMode
from torsh_distributed.parallel.models.materialize import is_on_meta
from torsh_distributed.parallel.torch_internals import tree_leaves
from torsh_distributed.train.batches import Batch
from torsh_distributed.train.loss import LossFn, loss_of

_ACTIVATION_SHARE = 0.2
"""The part of the budget that the first guess gives to activations."""
_MAX_MICRO_BATCH = 2**16


@dataclass(frozen=True, kw_only=True)
class BatchSizeConfig:
    """effective = micro × accumulation × data-parallel degree; local is one rank's part of it."""

    micro_batch_size: int
    gradient_accumulation: int
    data_degree: int
    largest_micro_batch_size: int
    """The largest that fits on every rank, to within a sixteenth; the target may need less."""
    peak_bytes: int
    """Memory measured in the trial step of the largest microbatch, on the rank that needed the most."""
    is_measured: bool = True
    """Whether steps were tried; else all of it is an estimate."""

    @property
    def local_batch_size(self) -> int:
        """Samples of one update on one rank."""
        return self.micro_batch_size * self.gradient_accumulation

    @property
    def effective_batch_size(self) -> int:
        """Samples of one update over all ranks: `training.batch_size` of a plan."""
        return self.local_batch_size * self.data_degree


def split_batch(target: int, *, largest_micro: int, data_degree: int) -> tuple[int, int]:
    """Microbatch and accumulation whose product with `data_degree` is nearest above `target`, in the fewest passes."""
    local = max(1, math.ceil(target / data_degree))
    accumulation = math.ceil(local / largest_micro)
    return math.ceil(local / accumulation), accumulation


def plan_batch_size(
    model: nn.Module,
    make_batch: Callable[[int], Batch],
    *,
    memory_bytes: int,
    loss_fn: LossFn | None = None,
    data_degree: int | None = None,
    target: int | None = None,
    reserved_bytes: int = 0,
) -> BatchSizeConfig:
    """Find by trial steps how large a microbatch fits into `memory_bytes`, and how often to accumulate for `target`.

    `make_batch(n)` gives a batch of n samples on the model's device. A trial is forward and backward of the model as it
    is, before `parallelize`; gradients are cleared and buffers restored. On a GPU the allocator's peak counts, and
    running out of memory halves the microbatch; on the CPU every tensor alive during the trial is counted.
    `reserved_bytes` stay free for what a trial does not show: optimizer state (8 bytes a parameter for Adam in fp32).
    `target` is the batch over all ranks, 32·sqrt(degree) if left out. In a process group every rank calls this, and
    all get the smallest microbatch found. The model's parameters are not changed. Of a model on the meta device no step
    can be tried: its memory is estimated for a GPU, `make_batch` gives its inputs, and `loss_fn` is not looked at.
    """
    degree = _degree(data_degree)
    wanted = round(32 * math.sqrt(degree)) if target is None else target
    if wanted < 1 or memory_bytes <= reserved_bytes:
        raise InvalidArgument(
            "a batch needs a sample and some memory",
            target=wanted,
            memory_bytes=memory_bytes,
            reserved_bytes=reserved_bytes,
        )
    budget = memory_bytes - reserved_bytes
    most = min(_MAX_MICRO_BATCH, math.ceil(wanted / degree))
    is_measured = not is_on_meta(model)
    if is_measured:
        micro, peak = _largest(lambda count: _trial_bytes(model, make_batch, loss_fn, count, budget), budget, most)
    else:
        batch = make_batch(1)
        inputs = batch[:1] if loss_fn is not None and isinstance(batch, tuple) else batch
        micro, peak = upward.load(upward.BATCH_ESTIMATE)(model, inputs, budget, most)
    found = [(micro, peak)]
    if process_group.is_initialized():
        found = [(int(size), int(size_bytes)) for size, size_bytes in all_gather_object([micro, peak])]
    if min(found)[0] == 0:
        raise MemoryAllocationFailed(
            "not even one sample fits into the memory budget",
            hint="checkpoint activations, shard the model, or allow more memory",
            memory_bytes=memory_bytes,
            reserved_bytes=reserved_bytes,
            peak_bytes=max(size_bytes for _, size_bytes in found),
        )
    largest = min(found)[0]
    micro, accumulation = split_batch(wanted, largest_micro=largest, data_degree=degree)
    return BatchSizeConfig(
        micro_batch_size=micro,
        gradient_accumulation=accumulation,
        data_degree=degree,
        largest_micro_batch_size=largest,
        peak_bytes=max(size_bytes for _, size_bytes in found),
        is_measured=is_measured,
    )


def _degree(data_degree: int | None) -> int:
    if data_degree is not None:
        return data_degree
    return process_group.world_size() if process_group.is_initialized() else 1


def _largest(trial: Callable[[int], int], budget: int, most: int) -> tuple[int, int]:
    """A microbatch up to `most` that stays within the budget, at most a sixteenth below the largest, with its bytes.

    Two small trials give bytes per sample; the first guess lies where activations take a fifth of the budget, later
    ones between the largest that fitted and the smallest that did not. 0 if not even one sample fits.
    """
    peak = trial(1)
    if peak > budget:
        return 0, peak
    fits, fits_bytes, too_large = 1, peak, most + 1
    per_sample = max(1, trial(2) - peak) if most > 1 else 1
    guess = int(_ACTIVATION_SHARE * budget / per_sample)
    while too_large - fits > max(1, fits // 16):
        guess = min(max(guess, fits + 1), too_large - 1)
        peak = trial(guess)
        if peak <= budget:
            fits, fits_bytes = guess, peak
            guess = fits + (budget - peak) // per_sample
        else:
            too_large = guess
            guess = (fits + too_large) // 2
    return fits, fits_bytes


def _trial_bytes(
    model: nn.Module, make_batch: Callable[[int], Batch], loss_fn: LossFn | None, count: int, budget: int
) -> int:
    """Peak bytes of one forward and backward with `count` samples; above the budget where memory ran out."""
    device = next(model.parameters()).device
    buffers = [buffer.clone() for buffer in model.buffers()]
    held: int = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            loss_of(model, make_batch(count), loss_fn).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            return int(torch.cuda.max_memory_allocated(device))
        with LiveBytes() as live:
            loss_of(model, make_batch(count), loss_fn).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        return held + int(live.peak)
    except (torch.OutOfMemoryError, MemoryError):
        return budget + 1
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, kept in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(kept)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the bytes of tensors created inside it and not yet freed: `now`, and their `peak`.

    The CPU allocator keeps no statistics, and the size of the process counts pages, not tensors. Covers what runs in
    this thread, which on the CPU includes backward.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view, or a result written into an argument, has the storage of one: only new storages count.
        given = {_storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage_id(leaf) not in given | self._seen:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
