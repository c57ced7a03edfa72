"""The engine of a process set: a thread that negotiates operations by name and runs those that all ranks want.

The first rank of the set keeps the `RequestTable`. The others send it what they ask for, as numbers where they can,
and it answers everyone with the operations that are ready, packed and in the order they run. Nothing happens between
operations: threads wait on their links. All ranks run the same answers in the same order, so they never wait for
different collectives.

An engine ends for the whole set at once: when a rank shuts down, is lost, or an operation fails underneath. Everything
submitted then fails on every rank with the reason.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.groups.abort import abort, forget_group
from torsh_distributed.errors import InvalidArgument, TorshError
from torsh_distributed.migrate.horovod.horovod_errors import HorovodInternalError
from torsh_distributed.migrate.horovod.negotiation.answers.agreed_answers import AnswerReader, AnswerWriter, PackedStep
from torsh_distributed.migrate.horovod.negotiation.answers.request_table import (
    NumberGiver,
    RequestNumbers,
    RequestTable,
)
from torsh_distributed.migrate.horovod.negotiation.control_links import ControlLink, LinkLost, connect_members
from torsh_distributed.migrate.horovod.negotiation.group_operations import GroupOperations
from torsh_distributed.migrate.horovod.negotiation.outbox import Outbox, report_buckets
from torsh_distributed.migrate.horovod.negotiation.request import EngineSettings, PendingOp, Request, request_from_wire
from torsh_distributed.migrate.horovod.negotiation.timeline_file import TimelineFile

_log = logging.getLogger(__name__)

_CLOSE_S = 10.0

# Messages: (kind, …). To the first rank: requests, the end. From it: answers, the end.
_REQUESTS, _ANSWER, _END = 0, 1, 2


class SetEngine:
    """The engine of one process set on one of its ranks. Every member constructs it at the same time.

    `ranks`: the members as ranks of the torch world. The group belongs to the engine, which destroys it.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], settings: EngineSettings, *, name: str = "global"
    ) -> None:
        self._group = group
        self._name = name
        self._settings = settings
        self._operations = GroupOperations(group, ranks)
        self._ranks = list(ranks)
        self._me = group.rank()
        self._links = connect_members(group, settings.timeout_s)
        self._is_first = self._me == 0
        self._giver = NumberGiver(settings.cache_capacity, group.size())
        self._table = RequestTable(group.size(), self._giver)
        self._writer = AnswerWriter(self._table, self._giver, threshold_bytes=settings.fusion_threshold_bytes)
        self._numbers: RequestNumbers = self._giver if self._is_first else RequestNumbers()
        self._reader = AnswerReader(self._numbers)
        self._num_answers = 0
        self._next_look_s = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: dict[str, PendingOp] = {}
        self._outbox = Outbox(settings.cycle_s)
        self._is_stopping = False
        self._failure: str | None = None
        self._cause: BaseException | None = None
        self._ended = False
        self.timeline: TimelineFile | None = None
        self._poll = select.poll()
        self._poll.register(self._outbox.wake_fd, select.POLLIN)
        self._poll.register(self._outbox.alarm_fd, select.POLLIN)
        self._by_fd: dict[int, tuple[int, ControlLink]] = {}
        for rank, link in self._links.items():
            self._poll.register(link, select.POLLIN)
            self._by_fd[link.fileno()] = (rank, link)
        self._thread = threading.Thread(target=self._serve, name=f"horovod {name}", daemon=True)
        self._thread.start()

    # --- callers ----------------------------------------------------------------------------------------------

    def submit(self, op: PendingOp, *, may_gather: bool = False) -> None:
        """Ask for an operation; it runs when every rank of the set has asked for it by the same name.

        `may_gather`: it is small, so others may be asked for with it; see `outbox`.
        """
        name = op.request.name
        with self._lock:
            if self._failure is not None:
                raise self._error(name)
            if name in self._pending:
                raise InvalidArgument(
                    f"an operation named {name!r} is in flight already on this rank",
                    hint="wait for it with hvd.synchronize(), or give the second one another name",
                    name=name,
                )
            self._pending[name] = op
            if self.timeline is not None:
                op.submitted_s = time.monotonic()
            must_wake = self._outbox.put(op, may_gather=may_gather)
        if must_wake:
            self._outbox.wake()

    def wait(self, op: PendingOp) -> Any:
        """The result of a submitted operation, or what it failed with."""
        if not op.is_done:
            self.hurry()
            with self._changed:
                while not op.is_done:
                    self._changed.wait()
        return op.take_result()

    def hurry(self) -> None:
        """Pass on what was submitted now: somebody waits for it."""
        with self._lock:
            must_wake = self._outbox.hurry()
        if must_wake:
            self._outbox.wake()

    def interrupt(self, reason: str) -> None:
        """From any thread: fail everything on this rank; the others hear of the reason as this one did."""
        self._end(reason, None)
        if not self._ended:
            self._outbox.wake()

    @property
    def failure(self) -> str | None:
        """Why the engine has ended; None while it works."""
        return self._failure

    def close(self) -> None:
        """End the set's operations on all ranks, and this rank's thread, links and group; once."""
        if self._ended:
            return
        self._ended = True
        with self._lock:
            self._is_stopping = True
            self._outbox.hurry()
        self._outbox.wake()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # Blocked in a collective of a rank that is gone: release it.
            self._end("the engine was closed while an operation was running", None)
            abort("Horovod was shut down", group=self._group)
            self._thread.join(_CLOSE_S)
        for link in self._links.values():
            link.close()
        self._outbox.close()
        self._release_group()

    def _release_group(self) -> None:
        if not dist.is_initialized():
            return
        name = self._group.group_name
        try:
            dist.destroy_process_group(self._group)
        except (TorshError, RuntimeError, ValueError) as error:
            _log.debug("the group of process set %s did not go down cleanly: %s", self._name, error)
        forget_group(name)

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with torch.no_grad():
                while self._turn():
                    pass
        except BaseException as error:  # raised where operations are waited for
            self._end(f"the engine failed: {type(error).__name__}: {error}", error)
            self._tell_end()

    def _turn(self) -> bool:
        """Pass on what was submitted, take what has arrived, run what is ready; False at the end."""
        with self._lock:
            submitted = self._outbox.take()
            is_stopping = self._is_stopping
        if self._failure is not None:
            return False
        try:
            if submitted:
                self._pass_on(submitted)
            if is_stopping and not submitted:
                self._say_goodbye()
                return self._failure is None
            if self._is_first:
                self._answer()
                if self._failure is not None:
                    return False
            self._take_messages(wait=not submitted)
            if self._is_first and self._failure is None:
                self._answer()
        except LinkLost as lost:
            self._end(f"rank {self._ranks[0]}, which leads the process set, is gone: {lost}", lost)
        return self._failure is None

    def _pass_on(self, submitted: Sequence[PendingOp]) -> None:
        """Put own requests into the table, or send them to the rank that keeps it."""
        number_of = self._numbers.number_of
        asked: list[int | Request] = []
        for op in submitted:
            number = number_of(op.request)
            asked.append(op.request if number is None else number)
        if self._is_first:
            self._table.add_all(0, asked)
        else:
            self._links[0].send((_REQUESTS, self._num_answers, asked))

    def _say_goodbye(self) -> None:
        """Leave in order: the first rank ends the set at once, another asks it to and runs what is still agreed."""
        if self._is_first or not self._links:
            self._end("Horovod has been shut down", None)
            self._tell_end()
            return
        self._links[0].send((_END, f"rank {self._ranks[self._me]} has shut down", self._me))
        deadline_s = time.monotonic() + _CLOSE_S
        while self._failure is None and time.monotonic() < deadline_s:
            self._take_messages(wait=True, at_most_s=1.0)

    def _take_messages(self, *, wait: bool, at_most_s: float | None = None) -> None:
        timeout_ms = 0 if not wait else self._patience_ms(at_most_s)
        for fd, mask in self._poll.poll(timeout_ms):
            if fd not in self._by_fd:
                with self._lock:
                    self._outbox.was_polled(fd)
                continue
            rank, link = self._by_fd[fd]
            if mask & select.POLLOUT:
                self._flush(link)
            if mask & ~select.POLLOUT:
                self._take_from(rank, link)

    def _patience_ms(self, at_most_s: float | None) -> int | None:
        """How long to wait for messages: for ever, unless stalls are watched and something waits."""
        if at_most_s is not None:
            return int(at_most_s * 1000)
        if self._is_first and self._table.is_waiting:
            limits = [one for one in (self._settings.stall_warning_s, self._settings.stall_shutdown_s) if one]
            if limits:
                return max(int(min(limits) * 1000), 1)
        return None

    def _flush(self, link: ControlLink) -> None:
        link.flush()
        if not link.has_unsent:
            self._poll.modify(link, select.POLLIN)

    def _send(self, link: ControlLink, message: Any) -> None:
        link.send(message)
        if link.has_unsent:
            self._poll.modify(link, select.POLLIN | select.POLLOUT)

    def _take_from(self, rank: int, link: ControlLink) -> None:
        try:
            messages = link.receive()
        except LinkLost as lost:
            self._poll.unregister(link)
            self._by_fd.pop(link.fileno(), None)
            if not self._is_first:
                raise
            self._end(f"rank {self._ranks[rank]} is gone: {lost}", lost)
            self._tell_end()
            return
        for kind, *parts in messages:
            if kind == _REQUESTS:
                seen, asked = parts
                self._giver.has_seen(rank, seen)
                self._table.add_all(rank, [one if type(one) is int else request_from_wire(one) for one in asked])
            elif kind == _ANSWER:
                self._num_answers, message, withdrawn = parts
                self._run_steps(self._reader.read(message, withdrawn))
            else:
                self._end(parts[0], None)
                if self._is_first:
                    self._tell_end()

    # --- answers ----------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """On the first rank: tell everyone what is ready, then run it too."""
        if self._table.is_waiting:
            self._watch_stalls()
        answer = self._writer.next_answer()
        if answer is None:
            return
        if self.timeline is not None:
            self.timeline.note_cycle()
        for link in self._links.values():
            self._send_to_member(link, (_ANSWER, answer.number, answer.message, answer.withdrawn))
        self._run_steps(answer.steps)

    def _send_to_member(self, link: ControlLink, message: Any) -> None:
        try:
            self._send(link, message)
        except LinkLost as lost:
            self._end(f"a rank of the process set is gone: {lost}", lost)
            self._tell_end()

    def _run_steps(self, steps: Sequence[PackedStep]) -> None:
        for step in steps:
            if self._failure is not None:
                return
            ops = list(map(self._pending.get, step.names))
            start_s = time.monotonic()
            if step[0].error:
                failed = ops[0]
                if failed is not None:
                    failed.error = HorovodInternalError(step[0].error, name=step[0].request.name)
            else:
                try:
                    self._operations.run(step, ops)
                except Exception as error:  # the others wait in this operation: all of them must learn of it
                    self._break(step[0].request.name, error)
                    return
            self._finish(step, ops, start_s)

    def _break(self, name: str, error: Exception) -> None:
        reason = f"{name} failed on rank {self._ranks[self._me]}: {_in_one_line(error)}"
        self._end(reason, error)
        self._tell_end()
        try:
            abort(reason, group=self._group)
        except TorshError as problem:
            _log.debug("the group could not be aborted: %s", problem)

    def _finish(self, step: PackedStep, ops: Sequence[PendingOp | None], start_s: float) -> None:
        timeline = self.timeline
        if timeline is not None:
            end_s = time.monotonic()
            for one, op in zip(step, ops, strict=True):
                label = one.request.kind.upper()
                if op is not None:
                    asked_s = start_s if op.submitted_s is None else op.submitted_s
                    timeline.note(one.request.name, f"NEGOTIATE_{label}", asked_s, start_s)
                timeline.note(one.request.name, label, start_s, end_s, bytes=one.request.num_bytes, packed=len(step))
        if events.wanted(events.BucketEvent):
            report_buckets(ops, time.monotonic() - start_s, self._group)
        with self._changed:
            for name, op in zip(step.names, ops, strict=True):
                if op is not None:
                    self._pending.pop(name, None)
                    op.is_done = True
            self._changed.notify_all()

    # --- stalls and the end -----------------------------------------------------------------------------------

    def _watch_stalls(self) -> None:
        warning_s, shutdown_s = self._settings.stall_warning_s, self._settings.stall_shutdown_s
        now_s = time.monotonic()
        if warning_s is None or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + warning_s / 10
        for stall in self._table.stalled(warning_s):
            missing = ", ".join(str(self._ranks[rank]) for rank in stall.missing)
            text = f"{stall.name} has waited {stall.waited_s:.0f} s for ranks that have not submitted it: {missing}"
            _log.warning(text)
            events.emit(events.LogEvent(level="warning", message=text))
            if shutdown_s is not None and stall.waited_s >= shutdown_s:
                self._end(f"{text}; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ({shutdown_s:g} s) is over", None)
                self._tell_end()
                return

    def _tell_end(self) -> None:
        """Tell the others why the set has ended; who is gone already need not know."""
        for link in self._links.values():
            try:
                self._send(link, (_END, self._failure, self._me))
            except LinkLost:
                continue

    def _end(self, reason: str, cause: BaseException | None) -> None:
        """Fail everything that was submitted, and what will be."""
        with self._changed:
            if self._failure is None:
                self._failure = reason
                self._cause = cause
            for name, op in self._pending.items():
                op.error = self._error(name)
                op.is_done = True
            self._pending.clear()
            self._changed.notify_all()

    def _error(self, name: str) -> HorovodInternalError:
        error = HorovodInternalError(f"{name}: {self._failure}", name=name, process_set=self._name)
        error.__cause__ = self._cause
        return error


def _in_one_line(error: BaseException) -> str:
    return error.message if isinstance(error, TorshError) else f"{type(error).__name__}: {error}"
