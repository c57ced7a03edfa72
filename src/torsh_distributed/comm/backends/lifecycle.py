"""The base of our process groups: identity, numbering and execution of calls, failure and shutdown."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.backends.executor import Body, OrderedExecutor, for_any_thread
from torsh_distributed.comm.backends.handles import CombinedWork, FinishedWork, HelpWith, PendingWork
from torsh_distributed.comm.backends.wire import UNSET_TIMEOUT, Call, Wire
from torsh_distributed.comm.recording.flight_recorder import OperationRecord, in_thread, recorder
from torsh_distributed.comm.recording.profiler_marks import Facts, begin_mark, is_profiled, mark, marked
from torsh_distributed.errors import BackendNotInitialized, CommunicationError, InvalidArgument, TorshError, first_line
from torsh_distributed.events import step_notes

if TYPE_CHECKING:
    from torsh_distributed.comm.backends.shared_gpu.gpu_wire import GpuWire

_CLOSE_TIMEOUT_S = 5.0
_UNTIMED = nullcontext()

_groups: weakref.WeakSet[GroupLifecycle] = weakref.WeakSet()


def _close(wire: Wire, executor: OrderedExecutor, pid: int) -> None:
    """Release what a group holds. A module function, because at garbage collection the group itself is gone."""
    if os.getpid() != pid:
        return  # in a forked child everything belongs to the parent
    if executor.is_busy:
        wire.abort("the group was shut down while a collective was running")
    executor.close(_CLOSE_TIMEOUT_S)
    wire.close()


def _refuse_in_child() -> None:
    for group in _groups:
        group.refuse(
            BackendNotInitialized(
                "this process was forked from the one that made the group; the group belongs to the parent",
                hint="initialise in the child only, or start children with the 'spawn' method",
                pid=os.getpid(),
            )
        )


os.register_at_fork(after_in_child=_refuse_in_child)


class GroupLifecycle(dist.ProcessGroup):
    """Identity, numbering, execution and end of a group; `short_path.py` and `base.py` add the collectives."""

    def __init__(self, store: dist.Store, wire: Wire, timeout: timedelta) -> None:
        # Torch lets Python derive from this constructor only; the store is kept here instead.
        super().__init__(wire.rank, wire.num_ranks)  # type: ignore[call-arg]  # not in torch's stubs
        self._store = store
        self._wire = wire
        self._timeout_ns = _nanoseconds(timeout)
        self.title = wire.name
        """The backend in the titles of profiles: as the user asked for it, whatever wire it chose."""
        self._name = ""
        self._desc = ""
        self._sequence = 0
        self._num_monitored = 0
        self._refusal: TorshError | None = None
        self._finished = FinishedWork()
        self._coalesced: list[dist.Work] | None = None
        self._gpu_wires: dict[torch.device, GpuWire] = {}
        self._executor = OrderedExecutor(f"torsh-{wire.name}")
        self._finalizer = weakref.finalize(self, _close, wire, self._executor, os.getpid())
        _groups.add(self)

    # --- identity, as c10d asks for it ------------------------------------------------------------------------

    @property
    def wire(self) -> Wire:
        """What moves this group's bytes."""
        return self._wire

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """The backend's name; c10d's `name()` comes here."""
        return self._wire.name

    def getRank(self) -> int:  # noqa: N802 - c10d's name
        """This process's rank in the group."""
        return self._wire.rank

    def getSize(self) -> int:  # noqa: N802 - c10d's name
        """The number of ranks in the group."""
        return self._wire.num_ranks

    def getGroupName(self) -> str:  # noqa: N802 - c10d's name
        """The name under which torch registered the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - c10d's name
        """Called by torch when it registers the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - c10d's name
        """The description given to `new_group`."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - c10d's name
        """Called by torch when it registers the group."""
        self._desc = desc

    @override
    def get_group_store(self) -> dist.Store:
        """The store through which the ranks met."""
        return self._store

    @property
    def fails_cleanly(self) -> bool:
        """Whether each all-reduce that failed so far left its tensor as it was; False if unknown."""
        return not self._gpu_wires and self._wire.fails_cleanly

    def _gpu(self, tensor: Tensor) -> GpuWire:
        """What carries tensors on the GPU of this one."""
        wire = self._gpu_wires.get(tensor.device)
        if wire is None:
            from torsh_distributed.comm.backends.shared_gpu.gpu_wire import GpuWire

            wire = self._gpu_wires[tensor.device] = GpuWire(self._wire, tensor.device)
        return wire

    @property
    @override
    def _device_types(self) -> list[torch.device]:
        has_gpu = self._wire.takes_gpu and torch.cuda.is_available()
        return [torch.device("cpu"), *([torch.device("cuda")] if has_gpu else [])]

    @override
    def _get_backend(self, device: torch.device) -> GroupLifecycle:  # type: ignore[override]  # group and backend in one
        if torch.device(device).type not in ("cpu", "cuda" if self._wire.takes_gpu else "cpu"):
            raise InvalidArgument(
                f"{self._wire.name} has no backend for {device}",
                hint="use nccl for CUDA tensors",
                device=str(device),
            )
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    @override
    def _set_sequence_number_for_group(self) -> None:
        """Numbers start at zero on every rank; there is nothing to agree on."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    @override
    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of calls from now on."""
        self._timeout_ns = _nanoseconds(timeout)

    _set_default_timeout = set_timeout

    @property
    def timeout_s(self) -> float:
        """The deadline of a call that has none of its own."""
        return self._timeout_ns / 1e9

    # --- running ----------------------------------------------------------------------------------------------

    def _new_call(self, operation: str, timeout: timedelta = UNSET_TIMEOUT) -> Call:
        """A call with its deadline, not yet numbered because it may be refused. Raises if the group has ended."""
        if self._refusal is not None:
            raise copy.copy(self._refusal)
        return Call(operation, self._timeout_ns if timeout == UNSET_TIMEOUT else _nanoseconds(timeout))

    def _number(self, call: Call) -> None:
        """Number a call; the number is the same on all ranks that make the same calls."""
        self._sequence += 1
        call.sequence = self._sequence

    def _start(self, body: Body, call: Call, *, is_async: bool, outputs: Sequence[Tensor]) -> dist.Work:
        """Run a collective's body now, or hand it to the group's thread; the order of calls is kept."""
        self._number(call)
        if not step_notes.wants_waits():
            return self._begin(body, call, outputs, is_async=is_async)
        events.reached(call.operation)
        record = self._new_record(call, outputs) if is_async else None
        if record is not None:
            # Nobody waits here, and the record says all there is to say: DDP starts a few in every step.
            work = self._submit(body, call, outputs, record)
            step_notes.note_started(record)
            return work
        # Written out, not as `with self._timed(...)`, which takes twice the time.
        start_s, cpu_s = time.monotonic(), time.thread_time()
        finished = self._begin(body, call, outputs, is_async=is_async)
        step_notes.note_wait(
            call.operation,
            self._name,
            start_s,
            time.monotonic(),
            (cpu_s, time.thread_time()),
            num_started=1,
            num_bytes=self._num_bytes(call, outputs),
            sequence=call.sequence,
        )
        return finished

    def _begin(self, body: Body, call: Call, outputs: Sequence[Tensor], *, is_async: bool) -> dist.Work:
        record = self._new_record(call, outputs)
        if not is_async and self._coalesced is None:
            now = body
            if is_profiled():
                now = marked(body, self._title(call), call.sources or outputs, self._facts(call, outputs))
            try:
                if self._executor.run(now, call):
                    if record is not None:
                        recorder.end_quietly(record)
                    return self._finished
            except BaseException as error:
                if record is not None:
                    recorder.end_quietly(record, error)
                self._note_failure(error)
                raise
        return self._submit(body, call, outputs, record)

    def _submit(self, body: Body, call: Call, outputs: Sequence[Tensor], record: OperationRecord | None) -> PendingWork:
        work = self._new_work(call, outputs, self._executor.help_with)
        work.record = record
        self._executor.submit(for_any_thread(body), call, work)
        self._track(work)
        return work

    def _new_record(self, call: Call, tensors: Sequence[Tensor], peer: int | None = None) -> OperationRecord | None:
        """The record of a call of torch's; None for a message of an operation that has been recorded."""
        if in_thread.is_inside:
            return None
        num_bytes = self._num_bytes(call, tensors)
        if peer is not None:
            with contextlib.suppress(ValueError):  # a group made without torch has no ranks of a world
                peer = dist.get_global_rank(self, peer)
        return recorder.begin(call.operation, self._name, num_bytes, peer, sequence=call.sequence)

    @contextmanager
    def _recorded(self, call: Call) -> Iterator[None]:
        """Around an operation that no wire carries."""
        record = self._new_record(call, ())
        error: BaseException | None = None
        try:
            with mark(self._title(call), (), self._facts(call, ())) if is_profiled() else nullcontext():
                yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if record is not None:
                recorder.end_quietly(record, error)

    def _new_work(self, call: Call, tensors: Sequence[Tensor], help_with: HelpWith) -> PendingWork:
        """A handle whose failure ends the group; waits for it are timed if an event subscriber wants that."""
        if step_notes.wants_waits():
            help_with = partial(_help_timed, help_with, call.operation, self._name)
        work = PendingWork(call.operation, tensors, help_with)
        work.on_error(self._note_failure)
        if is_profiled():
            work.mark = begin_mark(self._title(call), call.sources or tensors, self._facts(call, tensors))
        return work

    def _title(self, call: Call) -> str:
        """The name of an operation in torch's profilers."""
        return f"{self.title}:{call.operation}"

    def _facts(self, call: Call, tensors: Sequence[Tensor]) -> Facts:
        to, here = {}, self._wire.rank
        if call.tag is not None:
            peer = -1 if call.peer is None else call.peer
            source, target = (here, peer) if call.operation == "send" else (peer, here)
            to = {"Src Rank": source, "Dst Rank": target, "Tag": call.tag}
        return {
            "Collective name": call.operation,
            "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            "In msg nelems": sum(tensor.numel() for tensor in call.sources or tensors),
            "Out msg nelems": sum(tensor.numel() for tensor in tensors),
            **to,
            "Process Group Name": self._name,
            "Group size": self._wire.num_ranks,
            "Seq": call.sequence,
        }

    def _timed(self, call: Call, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Around the start of a message that fills `tensors`."""
        if not step_notes.wants_waits():
            return _UNTIMED
        num_bytes = self._num_bytes(call, tensors)
        return events.waiting(call.operation, self._name, num_started=1, num_bytes=num_bytes)

    def _num_bytes(self, call: Call, tensors: Sequence[Tensor]) -> int:
        # A reduce-scatter takes as much from every rank as it gives to all of them.
        parts = self._wire.num_ranks if call.operation.startswith("reduce_scatter") else 1
        # Not `nbytes`, which sparse tensors do not have.
        return parts * sum([tensor.numel() * tensor.element_size() for tensor in tensors])

    def _track(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @override
    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    @override
    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    # --- the end ----------------------------------------------------------------------------------------------

    def refuse(self, error: TorshError) -> None:
        """Raise `error` from every call from now on; the first reason stays."""
        if self._refusal is None:
            self._refusal = error

    def _note_failure(self, error: BaseException) -> None:
        """End the group here and on the other ranks: a collective that failed half-way leaves them out of step."""
        reason = first_line(error)
        refusal = CommunicationError(
            f"the group does not work any more: {reason}",
            hint="destroy it and make a new one of the ranks that live",
            group=self._name or None,
            backend=self._wire.name,
        )
        if isinstance(error, TorshError):
            error.world_peers = refusal.world_peers = self._ranks_named(error)
        self.refuse(refusal)
        self._wire.abort(reason)

    def _ranks_named(self, error: TorshError) -> tuple[int, ...]:
        """The ranks of the world that an error of this group points to."""
        facts = error.context
        named = [facts.get(name) for name in ("failed_rank", "peer", "origin")]
        named += list(facts.get("missing_ranks") or ())
        found = {rank for rank in named if isinstance(rank, int) and 0 <= rank < self._wire.num_ranks}
        with contextlib.suppress(ValueError, RuntimeError):  # a group made without torch has no ranks of a world
            return tuple(sorted(dist.get_global_rank(self, rank) for rank in found - {self._wire.rank}))
        return ()

    @override
    def abort(self, reason: str = "abort() was called") -> None:
        """Release every blocked call of this group, here and on the other ranks; then refuse work, naming the reason.

        From any thread. The tensors of pending calls are invalid afterwards.
        """
        self.refuse(
            CommunicationError(
                f"the group was aborted: {reason}",
                hint="destroy it and make a new one of the ranks that live",
                group=self._name or None,
                backend=self._wire.name,
                reason=reason,
            )
        )
        self._wire.abort(reason)

    @override
    def shutdown(self) -> None:
        """Leave the group and release its memory, files and threads. A second call does nothing."""
        self.refuse(
            BackendNotInitialized(
                "the group was shut down",
                hint="make a new group; one that was destroyed does not come back",
                group=self._name or None,
                backend=self._wire.name,
            )
        )
        self._finalizer()
        for wire in self._gpu_wires.values():
            wire.close()
        self._gpu_wires.clear()


def _help_timed(help_with: HelpWith, op: str, group: str, work: PendingWork, timeout_s: float | None) -> None:
    with events.waiting(op, group):
        help_with(work, timeout_s)


def _nanoseconds(timeout: timedelta) -> int:
    if timeout <= timedelta(0):
        raise InvalidArgument(
            "a timeout must be above zero",
            hint="leave it out for the group's default",
            timeout_s=timeout.total_seconds(),
        )
    return int(timeout.total_seconds() * 1_000_000_000)
