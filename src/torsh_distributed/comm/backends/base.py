"""The c10d process group that all our backends share: c10d's names and options in front of a wire.

Why so many names: torch calls a group under two generations of them (`_allgather_base` and `all_gather_single`,
`alltoall_base` and `all_to_all_single`, …), from Python and from C++ (DDP's reducer, functional collectives). Each
unpacks its options, checks its tensors on this rank before anything is sent, and ends in `_start`; plain calls take
the short path. Here are the collectives; messages and checks are in `group_calls.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from typing_extensions import override

from torsh_distributed.comm.backends import operations
from torsh_distributed.comm.backends.executor import Body, OneByOne
from torsh_distributed.comm.backends.group_calls import (
    GroupCalls,
    ReduceOpLike,
    list_for,
    only,
    reduce_options,
    refuse_unless_sum,
    rooted_options,
    timed_options,
)
from torsh_distributed.comm.backends.short_path import factor_of, parse_reduction
from torsh_distributed.comm.backends.staging import check_count, check_numel, check_rows, check_splits
from torsh_distributed.comm.backends.wire import BufferUse, Rows
from torsh_distributed.comm.meeting.monitored_barrier import meet_monitored


class TorshProcessGroup(GroupCalls):
    """A c10d process group whose bytes are moved by a wire.

    Collectives run in the order of the calls; sends and receives run beside them. With `asyncOp` the call returns at
    once and the group's thread or the waiting one does the work; a failed or aborted group refuses further work.
    """

    # --- reductions -------------------------------------------------------------------------------------------

    @override
    def allreduce(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        tensors: list[Tensor] | Tensor,
        opts: dist.AllreduceOptions | ReduceOpLike | None = None,
        timeout: timedelta | None = None,
        *,
        op: ReduceOpLike | None = None,
    ) -> dist.Work:
        """Fold one tensor over all ranks, in place."""
        if isinstance(opts, dist.AllreduceOptions) and self._all_reduce_at_once(tensors, opts):
            return self._finished
        options = reduce_options(dist.AllreduceOptions, opts if op is None else op, timeout)
        tensor = only(tensors, "all_reduce")
        call = self._new_call("all_reduce", options.timeout)
        if tensor.layout == torch.sparse_coo and tensor.is_cpu:
            refuse_unless_sum(options.reduceOp)
            body: Body = partial(operations.all_reduce_sparse, self._wire, tensor)
            return self._start(body, call, is_async=options.asyncOp, outputs=[tensor])
        self._check_tensor(tensor, "all_reduce")
        c10d_op = options.reduceOp
        ours, factor = parse_reduction(c10d_op, tensor.dtype), factor_of(c10d_op)
        fold = self._direct.get((hash(c10d_op), tensor.dtype))
        if not tensor.is_cpu:
            fold = None
        elif fold is None and factor is None and self._wire.supports(ours, tensor.dtype):
            fold = self._direct[hash(c10d_op), tensor.dtype] = self._wire.folder(ours, tensor.dtype)
        if fold is not None and tensor.is_contiguous():
            body = partial(fold, tensor)
        else:
            body = self._body(tensor, operations.all_reduce, tensor, ours, factor)
        return self._start(body, call, is_async=options.asyncOp, outputs=[tensor])

    @override
    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: dist.AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        """Fold every tensor of a list."""
        options = opts or dist.AllreduceCoalescedOptions()
        call = self._new_call("all_reduce_coalesced", options.timeout)
        bodies = []
        for tensor in tensors:
            self._check_tensor(tensor, call.operation)
            op = parse_reduction(options.reduceOp, tensor.dtype)
            bodies.append(self._body(tensor, operations.all_reduce, tensor, op, factor_of(options.reduceOp)))
        return self._start(OneByOne(bodies), call, is_async=options.asyncOp, outputs=tensors)

    @override
    def reduce(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        tensors: list[Tensor] | Tensor,
        opts: dist.ReduceOptions | int | None = None,
        op: ReduceOpLike = dist.ReduceOp.SUM,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Fold one tensor over all ranks into the root's."""
        options = rooted_options(dist.ReduceOptions, opts if root is None else root, timeout)
        if not isinstance(opts, dist.ReduceOptions):
            options.reduceOp = op  # type: ignore[assignment]  # converted by the setter
        tensor = only(tensors, "reduce")
        call = self._new_call("reduce", options.timeout)
        self._check_tensor(tensor, call.operation)
        at = self._check_rank(options.rootRank, call.operation)
        ours = parse_reduction(options.reduceOp, tensor.dtype)
        body = self._body(tensor, operations.reduce, tensor, ours, factor_of(options.reduceOp), at)
        return self._start(body, call, is_async=options.asyncOp, outputs=[tensor])

    @override
    def reduce_scatter(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        output_tensors: list[Tensor] | Tensor,
        input_tensors: list[list[Tensor]],
        opts: dist.ReduceScatterOptions | ReduceOpLike | None = None,
        timeout: timedelta | None = None,
        *,
        op: ReduceOpLike | None = None,
    ) -> dist.Work:
        """Fold a list with one tensor per rank and keep this rank's result."""
        options = reduce_options(dist.ReduceScatterOptions, opts if op is None else op, timeout)
        output = only(output_tensors, "reduce_scatter")
        sources = list_for(input_tensors, output_tensors, "reduce_scatter")
        call = self._new_call("reduce_scatter", options.timeout)
        self._check_list(sources, output, call.operation)
        check_numel(output, sources[self._wire.rank].numel(), call.operation, "output")
        ours = parse_reduction(options.reduceOp, output.dtype)
        body = self._body(output, operations.reduce_scatter, output, sources, ours, factor_of(options.reduceOp))
        call.sources = sources
        return self._start(body, call, is_async=options.asyncOp, outputs=[output])

    @override
    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: dist.ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Fold a tensor over all ranks and keep this rank's equal part."""
        if opts is not None and self._reduce_scatter_at_once(output, source, opts):
            return self._finished
        return self.reduce_scatter_single_coalesced([output], [source], opts, name="reduce_scatter_single")

    @override
    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        sources: list[Tensor],
        opts: dist.ReduceScatterOptions | None = None,
        *,
        name: str = "reduce_scatter_coalesced",
    ) -> dist.Work:
        """`reduce_scatter_single` for every pair of two lists."""
        options = opts or dist.ReduceScatterOptions()
        call = self._new_call(name, options.timeout)
        factor, bodies = factor_of(options.reduceOp), []
        for output, source in zip(outputs, sources, strict=True):
            self._check_pair(output, source, call.operation)
            check_numel(source, output.numel() * self._wire.num_ranks, call.operation, "input")
            op = parse_reduction(options.reduceOp, output.dtype)
            bodies.append(self._body(output, operations.reduce_scatter_single, output, source, op, factor))
        call.sources = sources
        return self._start(OneByOne(bodies), call, is_async=options.asyncOp, outputs=outputs)

    # --- copies -----------------------------------------------------------------------------------------------

    @override
    def broadcast(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        tensors: list[Tensor] | Tensor,
        opts: dist.BroadcastOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Make a tensor equal to the root's."""
        options = rooted_options(dist.BroadcastOptions, opts if root is None else root, timeout)
        tensor = only(tensors, "broadcast")
        call = self._new_call("broadcast", options.timeout)
        self._check_tensor(tensor, call.operation)
        at = self._check_rank(options.rootRank, call.operation)
        body = self._body(tensor, operations.broadcast, tensor, at)
        return self._start(body, call, is_async=options.asyncOp, outputs=[tensor])

    @override
    def allgather(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor] | Tensor,
        opts: AllgatherOptions | None = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Gather every rank's tensor into a list; sizes may differ from rank to rank."""
        source = only(input_tensors, "all_gather")
        outputs = list_for(output_tensors, input_tensors, "all_gather")
        options = timed_options(opts or AllgatherOptions(), timeout)
        return self._all_gather_lists([outputs], [source], options, "all_gather")

    @override
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """`allgather` for every tensor of a list; output_lists[r] has those of rank r."""
        per_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self._all_gather_lists(per_tensor, input_list, opts or AllgatherOptions(), "all_gather_coalesced")

    def _all_gather_lists(
        self, output_lists: list[list[Tensor]], sources: list[Tensor], options: AllgatherOptions, name: str
    ) -> dist.Work:
        call = self._new_call(name, options.timeout)
        bodies = []
        for outputs, source in zip(output_lists, sources, strict=True):
            self._check_list(outputs, source, call.operation)
            check_numel(source, outputs[self._wire.rank].numel(), call.operation, "input")
            bodies.append(self._body(source, operations.all_gather, outputs, source))
        flat = [tensor for outputs in output_lists for tensor in outputs]
        call.sources = sources
        return self._start(OneByOne(bodies), call, is_async=options.asyncOp, outputs=flat)

    @override
    def all_gather_single(self, output: Tensor, source: Tensor, opts: AllgatherOptions | None = None) -> dist.Work:
        """Gather every rank's tensor into one, one after the other."""
        if opts is not None and self._all_gather_at_once(output, source, opts):
            return self._finished
        return self.all_gather_single_coalesced([output], [source], opts, name="all_gather_single")

    @override
    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        sources: list[Tensor],
        opts: AllgatherOptions | None = None,
        *,
        name: str = "all_gather_single_coalesced",
    ) -> dist.Work:
        """`all_gather_single` for every pair of two lists."""
        options = opts or AllgatherOptions()
        call = self._new_call(name, options.timeout)
        bodies = []
        for output, source in zip(outputs, sources, strict=True):
            self._check_pair(output, source, call.operation)
            check_numel(output, source.numel() * self._wire.num_ranks, call.operation, "output")
            bodies.append(self._body(source, operations.all_gather_single, output, source))
        call.sources = sources
        return self._start(OneByOne(bodies), call, is_async=options.asyncOp, outputs=outputs)

    @override
    def gather(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor] | Tensor,
        opts: dist.GatherOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Gather every rank's tensor into a list on the root; the others pass no list."""
        options = rooted_options(dist.GatherOptions, opts if root is None else root, timeout)
        source = only(input_tensors, "gather")
        call = self._new_call("gather", options.timeout)
        at = self._check_rank(options.rootRank, call.operation)
        outputs: list[Tensor] | None = None
        if at == self._wire.rank:
            outputs = list_for(output_tensors, input_tensors, "gather")
            self._check_list(outputs, source, call.operation)
            for output in outputs:
                check_numel(output, source.numel(), call.operation, "output")
        self._check_tensor(source, call.operation)
        body = self._body(source, operations.gather, outputs, source, at)
        call.sources = [source]
        return self._start(body, call, is_async=options.asyncOp, outputs=outputs or [])

    @override
    def scatter(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        output_tensors: list[Tensor] | Tensor,
        input_tensors: list[list[Tensor]],
        opts: dist.ScatterOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give each rank its tensor of the root's list; the others pass no list."""
        options = rooted_options(dist.ScatterOptions, opts if root is None else root, timeout)
        output = only(output_tensors, "scatter")
        call = self._new_call("scatter", options.timeout)
        at = self._check_rank(options.rootRank, call.operation)
        sources: list[Tensor] | None = None
        if at == self._wire.rank:
            sources = list_for(input_tensors, output_tensors, "scatter")
            self._check_list(sources, output, call.operation)
            for source in sources:
                check_numel(source, output.numel(), call.operation, "input")
        self._check_tensor(output, call.operation)
        body = self._body(output, operations.scatter, output, sources, at)
        call.sources = sources
        return self._start(body, call, is_async=options.asyncOp, outputs=[output])

    @override
    def alltoall(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: dist.AllToAllOptions | None = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Exchange a list with one tensor per rank; sizes may differ from pair to pair."""
        options = timed_options(opts or dist.AllToAllOptions(), timeout)
        call = self._new_call("all_to_all", options.timeout)
        check_count(input_tensors, self._wire.num_ranks, call.operation)
        self._check_list(output_tensors, input_tensors[0], call.operation)
        self._check_list(input_tensors, output_tensors[0], call.operation)
        body = self._body(input_tensors[0], operations.all_to_all, output_tensors, input_tensors)
        call.sources = input_tensors
        return self._start(body, call, is_async=options.asyncOp, outputs=output_tensors)

    @override
    def all_to_all_single(  # type: ignore[override]  # one signature for c10d's overloads
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: dist.AllToAllOptions | None = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Exchange parts of a tensor cut along its first dimension; no sizes means equal parts."""
        options = timed_options(opts or dist.AllToAllOptions(), timeout)
        if not output_split_sizes and not input_split_sizes and self._all_to_all_at_once(output, source, options):
            return self._finished
        call = self._new_call("all_to_all_single", options.timeout)
        self._check_pair(output, source, call.operation)
        check_splits(output, output_split_sizes, self._wire.num_ranks, call.operation, "output")
        check_splits(source, input_split_sizes, self._wire.num_ranks, call.operation, "input")
        splits = list(output_split_sizes), list(input_split_sizes)
        body = self._body(source, operations.all_to_all_single, output, source, *splits)
        call.sources = [source]
        return self._start(body, call, is_async=options.asyncOp, outputs=[output])

    def collective_buffer(self, numel: int, dtype: torch.dtype, use: BufferUse) -> Tensor | None:
        """A tensor in the group's shared memory for the next call of that kind; None if there is none now.

        Every rank asks for the same sizes in the same order; whether it gets one may differ from rank to rank.
        """
        # A group that has ended has closed the file its memory is in.
        return None if self._refusal is not None else self._wire.collective_buffer(numel, dtype, use)

    def takes_rows(self, source: Tensor) -> bool:
        """Whether `exchange_rows` is for rows like these, (rows, …); the same on every rank."""
        row_bytes = math.prod(source.shape[1:]) * source.element_size()
        return source.is_cpu and self._wire.takes_rows(row_bytes, source.dtype)

    def exchange_rows(self, output: Tensor, source: Tensor, rows: Rows) -> dist.Work:
        """All-to-all of rows in any order; c10d has no such call. Both tensors are contiguous."""
        call = self._new_call("all_to_all_rows")
        self._check_pair(output, source, call.operation)
        check_rows(output, source, rows, self._wire.num_ranks, call.operation)
        body = partial(self._wire.exchange_rows, output, source, rows)
        return self._start(body, call, is_async=False, outputs=[output])

    @override
    def barrier(  # type: ignore[override]  # one signature for c10d's overloads
        self, opts: dist.BarrierOptions | None = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Wait until every rank has called it."""
        options = opts or dist.BarrierOptions()
        call = self._new_call("barrier", options.timeout if timeout is None else timeout)
        return self._start(self._wire.barrier, call, is_async=options.asyncOp, outputs=[])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not come, the first or all of them; the group stays usable."""
        limit = timedelta(seconds=self.timeout_s) if timeout is None else timeout
        call = self._new_call("monitored_barrier", limit)
        self._num_monitored += 1
        self._number(call)
        with self._recorded(call):
            meet_monitored(
                self._store,
                self._num_monitored,
                rank=self._wire.rank,
                num_ranks=self._wire.num_ranks,
                timeout=limit,
                waits_for_all=wait_all_ranks,
            )

    # --- the names of the other generation --------------------------------------------------------------------

    # Torch 2.11 has only these, and torch 2.13 still calls some.
    _allgather_base = all_gather_single  # type: ignore[assignment]  # only names of arguments differ
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
