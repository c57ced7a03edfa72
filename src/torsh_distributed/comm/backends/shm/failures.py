"""Turns a core's status into the error a user reads: which operation, who is missing, who died."""

from __future__ import annotations

from typing import Any, NoReturn

from torsh_distributed.comm.backends.shm.codes import Status, describe_signature
from torsh_distributed.comm.backends.shm.core import Core
from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.errors import (
    BackendError,
    CommunicationError,
    MemoryAllocationFailed,
    OperationTimeout,
    ProcessFailure,
    TensorShapeMismatch,
    TorshError,
)


class ShmFailures:
    """Builds the errors of one group."""

    def __init__(self, core: Core, rank: int) -> None:
        self._core = core
        self._rank = rank

    def raise_for(self, status: int, call: Call) -> NoReturn:
        """Raise the error of a collective that ended with `status`."""
        raise self.error(status, call, subject=self._core.subject(), missing=self._core.missing())

    def error(
        self, status: int, call: Call, *, subject: int, missing: list[int] | None = None, num_bytes: int | None = None
    ) -> TorshError:
        """The error for a status of this rank, or of the rank that failed first."""
        facts: dict[str, Any] = {"operation": call.operation, "sequence": call.sequence, "rank": self._rank}
        if status == Status.POISONED:
            return self._of_the_first_failure(facts)
        if status == Status.TIMEOUT:
            absent = missing if missing is not None else [subject] if subject >= 0 else None
            return OperationTimeout(
                f"{call.operation} number {call.sequence} was not done within {call.timeout_ns / 1e9:g} s"
                + (f"; missing: {_ranks(absent)}" if absent else ""),
                missing_ranks=absent,
                timeout_s=call.timeout_ns / 1e9,
                backend="shm",
                **facts,
            )
        if status == Status.DEAD:
            return _dead(subject, facts)
        if status == Status.LEFT:
            return _left(subject, facts)
        if status == Status.MISMATCH and num_bytes is not None:
            return TensorShapeMismatch(
                f"rank {subject} sent {num_bytes} bytes, which is not the size of the tensor that receives them",
                hint="receive into a tensor of the sender's shape and dtype, or use another tag",
                peer=subject,
                sent_bytes=num_bytes,
                **facts,
            )
        if status == Status.MISMATCH:
            return self._mismatch(subject, facts)
        return _resource(status, facts)

    def _mismatch(self, subject: int, facts: dict[str, Any]) -> TorshError:
        ours, theirs = self._core.signature(self._rank), self._core.signature(subject)
        if ours == theirs:  # only all_to_all compares more than signatures
            return TensorShapeMismatch(
                f"rank {subject} sends a different number of bytes than this rank expects from it",
                hint="the output split for a rank must be that rank's input split for this one",
                peer=subject,
                **facts,
            )
        return TensorShapeMismatch(
            f"ranks called different collectives: rank {self._rank} {describe_signature(ours)}; "
            f"rank {subject} {describe_signature(theirs)}",
            hint="all ranks must call the same collectives in the same order with the same sizes",
            peer=subject,
            **facts,
        )

    def _of_the_first_failure(self, facts: dict[str, Any]) -> TorshError:
        failure = self._core.failure()
        assert failure is not None, "a poisoned group has a record"
        status, origin, subject, text = failure
        if status == Status.DEAD:
            return _dead(subject, facts)
        if status == Status.LEFT:
            return _left(subject, facts)
        what = {
            Status.TIMEOUT: "gave up waiting",
            Status.MISMATCH: "found ranks in different collectives",
            Status.INTERRUPTED: "was interrupted by a signal",
            Status.NO_MEMORY: "ran out of shared memory",
            Status.OVERFLOW: "ran out of room for messages received out of order",
        }.get(Status(status), f"ended the group: {text}" if text else "ended the group")
        who = "this rank" if origin == self._rank else f"rank {origin}"
        return CommunicationError(
            f"{who} {what}",
            hint="look at that rank's error first; then destroy the group and make a new one",
            origin=origin,
            backend="shm",
            **facts,
        )


def _dead(subject: int, facts: dict[str, Any]) -> TorshError:
    return ProcessFailure(
        f"the process of rank {subject} ended while the group needed it",
        failed_rank=subject,
        backend="shm",
        **facts,
    )


def _left(subject: int, facts: dict[str, Any]) -> TorshError:
    if subject == facts["rank"]:
        return CommunicationError(
            "the group was shut down while the operation was pending",
            hint="wait for every work before destroy_process_group()",
            backend="shm",
            **facts,
        )
    return CommunicationError(
        f"rank {subject} left the group while this rank still needed it",
        hint="let all ranks run the same operations before destroy_process_group()",
        peer=subject,
        backend="shm",
        **facts,
    )


def _resource(status: int, facts: dict[str, Any]) -> TorshError:
    if status == Status.NO_MEMORY:
        return MemoryAllocationFailed(
            "the shared-memory segment cannot grow: memory is exhausted",
            hint="raise the memory limit of the container or lower the number of ranks per node",
            backend="shm",
            **facts,
        )
    if status == Status.OVERFLOW:
        return BackendError(
            "more than 1 GiB of messages was received out of order",
            hint="receive messages of one sender in the order they are sent, or wait for earlier tags first",
            backend="shm",
            **facts,
        )
    return BackendError(f"the core reported status {status}", backend="shm", **facts)


def _ranks(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
