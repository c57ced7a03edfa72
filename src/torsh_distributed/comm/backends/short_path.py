"""The short path of the most common calls: synchronous, on plain tensors, of sizes that fit.

Why: such a call needs no staging, no other thread and no events, and finding that out in the general path takes longer
than a small collective does. Other calls are left to the general path, untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler as _torch_profiler
from torch.distributed.distributed_c10d import AllgatherOptions

from torsh_distributed.comm.backends.lifecycle import GroupLifecycle
from torsh_distributed.comm.backends.wire import UNSET_TIMEOUT, Call, Folder, ScatterFolder, Wire
from torsh_distributed.comm.recording.flight_recorder import in_thread, recorder
from torsh_distributed.comm.reduce_op import ReduceOp, is_integer
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.events.step_notes import wants_waits

# By the hash of a torch ReduceOp, which is c10d's number and by far the cheapest way to ask one what it is.
_BY_NUMBER = {
    hash(getattr(dist.ReduceOp, name)): op
    for name, op in {
        "SUM": ReduceOp.SUM,
        "AVG": ReduceOp.MEAN,
        "PRODUCT": ReduceOp.PRODUCT,
        "MIN": ReduceOp.MIN,
        "MAX": ReduceOp.MAX,
        "BAND": ReduceOp.BAND,
        "BOR": ReduceOp.BOR,
        "BXOR": ReduceOp.BXOR,
    }.items()
}
_PREMUL_SUM = hash(dist.ReduceOp.PREMUL_SUM)
# Sums of truth values are "any", products "all": the bitwise ops of the same meaning never leave 0 and 1.
_OF_BOOLS = {
    ReduceOp.SUM: ReduceOp.BOR,
    ReduceOp.MAX: ReduceOp.BOR,
    ReduceOp.PRODUCT: ReduceOp.BAND,
    ReduceOp.MIN: ReduceOp.BAND,
}
_checked: dict[tuple[int, torch.dtype], ReduceOp] = {}


def parse_reduction(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> ReduceOp:
    """The op that a wire has to do for this c10d op and dtype; InvalidArgument if the pair has no meaning.

    PREMUL_SUM becomes a sum: the caller multiplies first, see `factor_of`. Bools reduce bitwise. A mean of integers
    drops the fraction.
    """
    number = hash(op)
    known = _checked.get((number, dtype))
    if known is not None:
        return known
    if number == _PREMUL_SUM:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise InvalidArgument(
                f"premul_sum is not defined for {dtype}",
                hint="convert the tensor to a floating type first",
                dtype=str(dtype),
            )
        ours = ReduceOp.SUM
    elif number in _BY_NUMBER:
        ours = _BY_NUMBER[number]
        # c10d's users average counts, as NCCL lets them (Lightning does so wherever the backend is not called gloo).
        if ours is not ReduceOp.MEAN or not is_integer(dtype):
            ours.check(dtype)
    else:
        raise InvalidArgument("unknown reduction", hint="use one of torch.distributed.ReduceOp", op=str(op))
    if dtype == torch.bool:
        ours = _OF_BOOLS.get(ours, ours)
    _checked[number, dtype] = ours
    return ours


def factor_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> float | Tensor | None:
    """What PREMUL_SUM multiplies with, None for every other op."""
    if hash(op) != _PREMUL_SUM:
        return None
    # The factor has no accessor in every torch we support, but the op pickles with it.
    state: tuple[object, float | Tensor | None] = op.__getstate__()  # type: ignore[assignment]  # not in torch's stubs
    factor = state[1]
    if factor is None:
        raise InvalidArgument(
            "PREMUL_SUM needs a factor", hint="make the op with torch.distributed._make_nccl_premul_sum(factor)"
        )
    return factor


_STRIDED = torch.strided
_note_briefly = recorder.note_briefly
_TENSORS = (Tensor, torch.nn.Parameter)


class _TimedOptions(Protocol):
    """What the options of c10d's collectives have in common."""

    @property
    def asyncOp(self) -> bool: ...  # noqa: N802 - c10d's name
    @property
    def timeout(self) -> timedelta: ...


class _PlainOptions(NamedTuple):
    """The options of a plain call, without the cost of c10d's."""

    asyncOp: bool = False  # noqa: N815 - c10d's name
    timeout: timedelta = UNSET_TIMEOUT


_PLAIN = _PlainOptions()


class ShortPath(GroupLifecycle):
    """Runs a collective at once, in the caller's thread; each method says whether it did."""

    def __init__(self, store: dist.Store, wire: Wire, timeout: timedelta) -> None:
        super().__init__(store, wire, timeout)
        # By pairs of reduction, as its number, and dtype that the wire folds itself, as earlier calls showed.
        self._direct: dict[tuple[int, torch.dtype], Folder] = {}
        self._by_name: dict[tuple[str, torch.dtype], Folder] = {}
        self._direct_scatter: dict[tuple[int, torch.dtype], ScatterFolder] = {}
        self._call_at_once = Call("", self._timeout_ns)

    def fold_of(self, op: ReduceOp | str, dtype: torch.dtype) -> Folder | None:
        """The function that folds such tensors, if an earlier call has looked it up."""
        fold = self._by_name.get((op, dtype))
        if fold is None:
            fold = self._direct.get((ReduceOp.parse(op).to_torch().value, dtype))
            if fold is not None:
                self._by_name[op, dtype] = fold
        return fold

    def all_reduce_now(self, tensor: Tensor, fold: Folder) -> bool:
        """All-reduce without torch, whose dispatch to a Python group takes about as long as a small collective.

        Torch's dispatcher has no part in such calls anyway; for a profiler, the general path marks the call.
        """
        if type(tensor) not in _TENSORS or not _is_plain(tensor):
            return False
        return self._run_at_once("all_reduce", _PLAIN, fold, tensor)

    def _all_reduce_at_once(self, tensors: list[Tensor] | Tensor, opts: dist.AllreduceOptions) -> bool:
        """For a pair of reduction and dtype that was seen before."""
        if len(tensors) != 1:
            return False
        tensor = tensors[0]
        fold = self._direct.get((hash(opts.reduceOp), tensor.dtype))
        if fold is None or not _is_plain(tensor):
            return False
        return self._run_at_once("all_reduce", opts, fold, tensor)

    def _reduce_scatter_at_once(self, output: Tensor, source: Tensor, opts: dist.ReduceScatterOptions) -> bool:
        key, numel = (hash(opts.reduceOp), output.dtype), output.numel()
        if source.dtype != output.dtype or source.numel() != numel * self._wire.num_ranks or numel == 0:
            return False
        if not _is_plain(output) or not _is_plain(source):
            return False
        fold = self._direct_scatter.get(key)
        if fold is None:
            op = parse_reduction(opts.reduceOp, output.dtype)
            if factor_of(opts.reduceOp) is not None or not self._wire.supports(op, output.dtype):
                return False
            fold = self._direct_scatter[key] = self._wire.scatter_folder(op, output.dtype)
        return self._run_at_once("reduce_scatter_single", opts, fold, output, source)

    def _all_gather_at_once(self, output: Tensor, source: Tensor, opts: AllgatherOptions) -> bool:
        numel = source.numel()
        if source.dtype != output.dtype or output.numel() != numel * self._wire.num_ranks or numel == 0:
            return False
        if not _is_plain(output) or not _is_plain(source):
            return False
        return self._run_at_once("all_gather_single", opts, self._wire.all_gather_flat, output, source)

    def _all_to_all_at_once(self, output: Tensor, source: Tensor, opts: dist.AllToAllOptions) -> bool:
        """Of equal parts."""
        numel, num_ranks = source.numel(), self._wire.num_ranks
        if source.dtype != output.dtype or output.numel() != numel or numel == 0:
            return False
        if any(not _is_plain(one) or one.dim() == 0 or one.shape[0] % num_ranks for one in (output, source)):
            return False
        return self._run_at_once("all_to_all_single", opts, self._wire.all_to_all_flat, output, source)

    def _run_at_once(self, operation: str, opts: _TimedOptions, body: Callable[..., None], *tensors: Tensor) -> bool:
        """Run `body(*tensors, call)` in this thread if no call is before it; whether it ran."""
        if opts.asyncOp or self._refusal is not None or self._coalesced is not None:
            return False
        if _torch_profiler._is_profiler_enabled:
            return False
        if wants_waits() or opts.timeout != UNSET_TIMEOUT or not self._executor.begin():
            return False
        call = self._call_at_once  # only used while holding the turn
        call.operation = operation
        call.timeout_ns = self._timeout_ns
        call.sequence = self._sequence = self._sequence + 1
        if opts is not _PLAIN and not in_thread.is_inside:  # else part of an operation that is recorded
            _note_briefly((operation, self._name, self._sequence, tensors[0].nbytes))
        try:
            body(*tensors, call)
        except BaseException as error:
            self._note_failure(error)
            raise
        finally:
            self._executor.end()
        return True


def _is_plain(tensor: Tensor) -> bool:
    """Whether a wire can take the tensor as it is, without further checks."""
    return tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous() and not tensor.is_conj()
