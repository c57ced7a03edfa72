"""Tensors and reductions as MPI knows them.

Why some reductions are ours: no MPI has bfloat16, few have half precision, and MPI's minimum of a number and NaN
depends on their order, so ranks could disagree. A user-defined operation, which MPI calls and torch computes, has none
of these problems. For bfloat16 it was also the fastest way (measured; see the decision record).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torsh_distributed.comm.reduce_op import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI

    Spec = tuple[MPI.buffer, int, MPI.Datatype]

MAX_COUNT = 2**31 - 1
"""The most elements per call in every MPI: counts are C ints before MPI 4."""
_BLOCK_BYTES = 2**20

_INTEGERS = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.uint16: "UINT16_T",
    torch.int16: "INT16_T",
    torch.uint32: "UINT32_T",
    torch.int32: "INT32_T",
    torch.uint64: "UINT64_T",
    torch.int64: "INT64_T",
}
_FLOATS = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_HALVES = (torch.bfloat16, torch.float16)

_NATIVE = {
    ReduceOp.SUM: "SUM",
    ReduceOp.MEAN: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT)
_ORDER = (ReduceOp.MIN, ReduceOp.MAX)
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

# Each writes to its second argument.
_FOLDS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "SUM": lambda other, mine: mine.add_(other),
    "PROD": lambda other, mine: mine.mul_(other),
    "MIN": lambda other, mine: torch.minimum(mine, other, out=mine),
    "MAX": lambda other, mine: torch.maximum(mine, other, out=mine),
}


def _is_native(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether MPI has this reduction itself, with a result that does not depend on the order of ranks."""
    if dtype in _INTEGERS:
        return op is not ReduceOp.MEAN
    if dtype == torch.bool:
        return op in _BITS
    return dtype in _FLOATS and op in _ARITHMETIC


def _is_ours(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether torch does the reduction inside MPI's algorithm."""
    if dtype in _HALVES:
        return op in _ARITHMETIC or op in _ORDER
    return dtype in _FLOATS and op in _ORDER


SUPPORTED = frozenset(
    (op, dtype)
    for op in ReduceOp
    for dtype in (*_INTEGERS, *_FLOATS, *_HALVES, torch.bool)
    if _is_native(op, dtype) or _is_ours(op, dtype)
)
"""The reductions that MPI does itself or with our operation."""


class MpiDatatypes:
    """Describes tensors as MPI's calls take them; nothing is copied."""

    def __init__(self, mpi: ModuleType) -> None:
        self._mpi = mpi
        names = {**_INTEGERS, **_FLOATS, torch.bool: "UINT8_T"}
        self._types: dict[torch.dtype, MPI.Datatype] = {dtype: getattr(mpi, name) for dtype, name in names.items()}
        # Separate types, though the bytes are those of an integer: the operation finds its dtype by the type.
        self._types |= {dtype: mpi.UINT16_T.Dup() for dtype in _HALVES}
        self._dtypes = {self._types[dtype].handle: dtype for dtype in (*_FLOATS, *_HALVES)}
        self._ours: dict[str, MPI.Op] = {}
        self._ops: dict[tuple[ReduceOp, torch.dtype], MPI.Op] = {}
        self._large: dict[int, MPI.Datatype] = {}

    def numbers(self, tensor: Tensor) -> Spec:
        """The tensor as numbers, for reductions. At most MAX_COUNT of them."""
        numel = tensor.numel()
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), numel * tensor.element_size())
        return memory, numel, self._types[tensor.dtype]

    def raw(self, tensor: Tensor) -> Spec:
        """The tensor as bytes, however many."""
        return self.raw_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def raw_at(self, address: int, num_bytes: int, *, times: int = 1) -> Spec:
        """`times` pieces of `num_bytes` each, one after the other."""
        memory = self._mpi.buffer.fromaddress(address, num_bytes * times)
        if num_bytes <= MAX_COUNT:
            return memory, num_bytes, self._mpi.BYTE
        return memory, 1, self._large_type(num_bytes)

    def _large_type(self, num_bytes: int) -> MPI.Datatype:
        """One element as large as the message: whole blocks, then the rest. It stays committed for reuse."""
        if num_bytes not in self._large:
            num_blocks, rest = divmod(num_bytes, _BLOCK_BYTES)
            block = self._mpi.BYTE.Create_contiguous(_BLOCK_BYTES)
            parts = [num_blocks, rest], [0, num_blocks * _BLOCK_BYTES], [block, self._mpi.BYTE]
            self._large[num_bytes] = self._mpi.Datatype.Create_struct(*parts).Commit()
            block.Free()
        return self._large[num_bytes]

    def op(self, op: ReduceOp, dtype: torch.dtype) -> MPI.Op:
        """MPI's operation for a pair in SUPPORTED; a mean is a sum that the caller divides."""
        known = self._ops.get((op, dtype))
        if known is None:
            name = _NATIVE[op]
            known = getattr(self._mpi, name) if _is_native(op, dtype) else self._our_op(name)
            self._ops[op, dtype] = known
        return known

    def _our_op(self, name: str) -> MPI.Op:
        if name not in self._ours:
            self._ours[name] = self._mpi.Op.Create(partial(self._fold, _FOLDS[name]), commute=True)
        return self._ours[name]

    def _fold(
        self, fold: Callable[[Tensor, Tensor], object], other: MPI.buffer, mine: MPI.buffer, datatype: MPI.Datatype
    ) -> None:
        """Called by MPI, in any thread that makes progress, with parts of two ranks' tensors; changes the second.

        It waits for the GIL inside MPI. This cannot deadlock: mpi4py releases it in every call that may wait.
        """
        dtype = self._dtypes[datatype.handle]
        fold(torch.frombuffer(other, dtype=dtype), torch.frombuffer(mine, dtype=dtype))
