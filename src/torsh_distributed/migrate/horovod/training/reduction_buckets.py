"""Gradients packed for the engine: each bucket is one operation, reduced in place while backward computes the rest.

A bucket has one buffer for the whole training. Gradients are copied into it once, when the last of them is computed,
and `param.grad` then points into it. Behind the gradients it has one flag per parameter, which says whether some rank's
gradient is sparse: reduced with the rest, it tells every rank which gradients are summed as sparse ones, also a rank
that computed none for that parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor, nn

from torsh_distributed.migrate.horovod.collectives.horovod_compression import (
    CastCompressor,
    CodecCompressor,
    Compressor,
    NoneCompressor,
    submit_codec_mean,
)
from torsh_distributed.migrate.horovod.collectives.operation_submission import (
    OperationResults,
    OperationTerms,
    all_results,
    submit,
    synchronize,
)
from torsh_distributed.migrate.horovod.collectives.reduction_names import ReductionName
from torsh_distributed.migrate.horovod.horovod_errors import HorovodInternalError
from torsh_distributed.migrate.horovod.negotiation.request import BucketFacts, OpKind, RequestFlags
from torsh_distributed.migrate.horovod.process_sets import ProcessSet
from torsh_distributed.migrate.horovod.world_state import is_up
from torsh_distributed.parallel.torch_internals import _foreach_copy_

FIRST_BUCKET_BYTES = 2**20
"""The first bucket to fill is small, so the network is busy early."""
BUCKET_BYTES = 25 * 2**20


class Reduction(Protocol):
    """How an optimizer reduces: what its buckets need to know."""

    op: ReductionName
    prescale: float
    postscale: float
    process_set: ProcessSet
    compression: type[Compressor] | Compressor
    num_steps: int
    """Steps that were reduced."""
    sparse_as_dense: bool


class ReductionBucket:
    """Parameters whose gradients travel as one operation."""

    def __init__(
        self, name: str, index: int, params: Sequence[nn.Parameter], names: Sequence[str], reduction: Reduction
    ) -> None:
        self.name = name
        self._index = index
        self.params = list(params)
        self._names = list(names)
        self._checksum = zlib.crc32("\0".join(names).encode())
        self._reduction = reduction
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._contexts: list[object] = []
        self._was_sparse: set[int] = set()
        """Indices of parameters whose gradient travels as a dense one."""
        self._handle: int | None = None
        self.num_missing = len(self.params)

    @property
    def is_travelling(self) -> bool:
        """Whether it was submitted and not waited for yet."""
        return self._handle is not None

    def reset(self) -> None:
        """Wait for all gradients again."""
        self.num_missing = len(self.params)

    def submit(self) -> None:
        """Hand over the gradients as they are now; missing ones count as zero."""
        compression = self._reduction.compression
        if self._reduction.sparse_as_dense:
            self._make_dense()
        if isinstance(compression, CodecCompressor):
            self._submit_codec(compression)
        elif _wire_dtype(compression, self.params[0].dtype) is not None:
            self._submit_flat()
        else:
            self._submit_compressed(compression)

    def finish(self) -> list[nn.Parameter]:
        """Wait, and leave the results in `param.grad`; returns the parameters that some rank has a sparse gradient for.

        Sparse gradients stay as they are, unless `sparse_as_dense` lets them travel with the rest.
        """
        assert self._handle is not None, "it was submitted"
        handle, self._handle = self._handle, None
        results = synchronize(handle)
        if isinstance(self._reduction.compression, CodecCompressor):
            for param, result in zip(self.params, results, strict=True):
                _take(param, result)
            return []
        if self._contexts:
            *reduced, flags = results
            for param, result, context in zip(self.params, reduced, self._contexts, strict=True):
                if param.grad is None or not param.grad.is_sparse:
                    _take(param, self._reduction.compression.decompress(result, context))
            self._contexts = []
            return self._sparse(flags)
        assert self._flat is not None, "it was filled when it was submitted"
        is_cast = self._flat.dtype != self.params[0].dtype
        for param, view in zip(self.params, self._views, strict=True):
            if param.grad is not None and param.grad.is_sparse:
                continue
            if is_cast:
                _take(param, view.to(param.dtype) if param.grad is None else view)
            elif param.grad is not view:
                param.grad = view
        return self._sparse(self._flat[-len(self.params) :])

    def drop(self) -> None:
        """Forget a step that was given up; what still travels is waited for, because it uses the buffer."""
        handle, self._handle, self._contexts = self._handle, None, []
        if handle is not None and is_up():
            with suppress(HorovodInternalError):  # it failed: nothing uses the buffer any more
                synchronize(handle)

    def _make_dense(self) -> None:
        self._was_sparse = set()
        for index, param in enumerate(self.params):
            if param.grad is not None and param.grad.is_sparse:
                self._was_sparse.add(index)
                param.grad = param.grad.to_dense()

    # --- the ways to travel -----------------------------------------------------------------------------------

    def _submit_flat(self) -> None:
        if self._flat is None:
            self._allocate()
        flat = self._flat
        assert flat is not None, "allocated"
        targets, sources = [], []
        for param, view in zip(self.params, self._views, strict=True):
            grad = param.grad
            if grad is None or grad.is_sparse:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(grad)
        if targets:
            _foreach_copy_(targets, sources)
        self._set_flags(flat[-len(self.params) :])
        self._send([flat], [flat], RequestFlags.SHARED)

    def _submit_compressed(self, compression: type[Compressor] | Compressor) -> None:
        small = []
        for param in self.params:
            grad = torch.zeros_like(param) if param.grad is None or param.grad.is_sparse else param.grad
            tensor, context = compression.compress(grad)
            small.append(tensor.contiguous())
            self._contexts.append(context)
        flags = self.params[0].new_zeros(len(self.params), dtype=torch.float32)
        self._set_flags(flags)
        self._send([*small, flags], None, RequestFlags.NONE)

    def _submit_codec(self, compression: CodecCompressor) -> None:
        reduction = self._reduction
        grads = [torch.zeros_like(param) if param.grad is None else param.grad.to_dense() for param in self.params]
        scale = reduction.prescale * reduction.postscale
        self._handle = submit_codec_mean(
            grads,
            self._names,
            self.name,
            compression,
            reduction.op,
            scale,
            reduction.process_set,
            bucket=self._facts(compression.config.method),
        )

    def _send(self, tensors: list[Tensor], outputs: list[Tensor] | None, flags: RequestFlags) -> None:
        reduction = self._reduction
        self._handle = submit(
            OpKind.ALLREDUCE,
            tensors,
            self.name,
            reduction.process_set,
            OperationTerms(
                op=str(reduction.op),
                prescale=reduction.prescale,
                postscale=reduction.postscale,
                splits=(self._checksum,),
                flags=flags,
            ),
            OperationResults(
                outputs=outputs,
                bucket=self._facts(None if tensors[0].dtype == self.params[0].dtype else str(tensors[0].dtype)),
                finish=all_results,
            ),
        )

    def _facts(self, codec: str | None) -> BucketFacts:
        num_bytes = sum(param.nbytes for param in self.params)
        return BucketFacts(self._reduction.num_steps, self._index, num_bytes, codec)

    def _allocate(self) -> None:
        first = self.params[0]
        dtype = _wire_dtype(self._reduction.compression, first.dtype)
        numel = sum(param.numel() for param in self.params)
        self._flat = torch.zeros(numel + len(self.params), dtype=dtype, device=first.device)
        sizes = [*(param.numel() for param in self.params), len(self.params)]
        pieces = torch.split(self._flat, sizes)[:-1]
        self._views = [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]

    def _set_flags(self, flags: Tensor) -> None:
        flags.zero_()
        for index, param in enumerate(self.params):
            if index in self._was_sparse or (param.grad is not None and param.grad.is_sparse):
                flags[index] = 1

    def _sparse(self, flags: Tensor) -> list[nn.Parameter]:
        if not bool(flags.any()):
            return []
        return [param for param, flag in zip(self.params, flags.tolist(), strict=True) if flag]


def _wire_dtype(compression: type[Compressor] | Compressor, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of a buffer that travels as it is; None where a script's own code makes tensors smaller."""
    kind = compression if isinstance(compression, type) else type(compression)
    if kind is NoneCompressor:
        return dtype
    if issubclass(kind, CastCompressor) and dtype.is_floating_point:
        return kind.dtype
    return None


def _take(param: nn.Parameter, value: Tensor) -> None:
    if param.grad is None:
        param.grad = value.to(param.dtype)
    else:
        param.grad.copy_(value)


def plan_reduction_buckets(
    params: Sequence[nn.Parameter], *, limit_bytes: int, groups: int | Sequence[Sequence[Tensor]] | None
) -> list[list[nn.Parameter]]:
    """The parameters of each bucket, those of the last layers first. A bucket has one dtype and one device.

    `groups`: so many buckets of equal numbers of parameters, or the tensors of each; what is not listed goes alone.
    """
    if groups is None or groups == 0:
        return _filled(list(reversed(params)), limit_bytes)
    if isinstance(groups, int):
        share = -(-len(params) // groups)
        chunks = [list(params[start : start + share]) for start in range(0, len(params), share)]
    else:
        chunks = [[param for param in params if any(param is one for one in group)] for group in groups]
        listed = {id(param) for chunk in chunks for param in chunk}
        chunks += [[param] for param in params if id(param) not in listed]
    return [bucket for chunk in reversed(chunks) if chunk for bucket in _of_one_kind(chunk)]


def _filled(params: Sequence[nn.Parameter], limit_bytes: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    used_bytes, kind = 0, None
    for param in params:
        limit = min(FIRST_BUCKET_BYTES, limit_bytes) if len(buckets) <= 1 else limit_bytes
        if not buckets or kind != (param.dtype, param.device) or used_bytes + param.nbytes > limit:
            buckets.append([])
            used_bytes, kind = 0, (param.dtype, param.device)
        buckets[-1].append(param)
        used_bytes += param.nbytes
    return buckets


def _of_one_kind(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[object, list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    return list(kinds.values())
