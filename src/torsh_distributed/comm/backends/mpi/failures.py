"""Builds the errors a user reads: which operation, who is missing, who left, what MPI says."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.errors import (
    BackendError,
    CommunicationError,
    InvalidArgument,
    OperationTimeout,
    ProcessFailure,
    TensorShapeMismatch,
    TorshError,
)

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiFailures:
    """Builds the errors of one rank of one group."""

    def __init__(self, mpi: ModuleType, rank: int) -> None:
        self._mpi = mpi
        self._rank = rank

    def _facts(self, call: Call) -> dict[str, Any]:
        return {"operation": call.operation, "sequence": call.sequence, "rank": self._rank, "backend": "mpi4py"}

    def late(self, call: Call, missing: Sequence[int]) -> TorshError:
        """The deadline passed; `missing` are the ranks that have not announced this collective."""
        who = ", ".join(f"rank {rank}" for rank in missing)
        return OperationTimeout(
            f"{call.operation} number {call.sequence} was not done within {call.timeout_ns / 1e9:g} s"
            + (f"; missing: {who}" if who else ""),
            missing_ranks=list(missing),
            timeout_s=call.timeout_ns / 1e9,
            **self._facts(call),
        )

    def ended(self, call: Call, origin: int, reason: str) -> TorshError:
        """Some rank ended the group while this operation was pending."""
        who = "this rank" if origin == self._rank else f"rank {origin}"
        return CommunicationError(
            f"{who} ended the group: {reason}",
            hint="look at that rank's error first; then destroy the group and make a new one",
            origin=origin,
            **self._facts(call),
        )

    def left(self, call: Call, peer: int) -> TorshError:
        """A rank destroyed the group, or its process ended normally, before this operation."""
        return CommunicationError(
            f"rank {peer} left the group while this rank still needed it",
            hint="let all ranks run the same operations before destroy_process_group()",
            peer=peer,
            **self._facts(call),
        )

    def closed(self, call: Call) -> TorshError:
        """The group was shut down here with the operation pending."""
        return CommunicationError(
            "the group was shut down while the operation was pending",
            hint="wait for every work before destroy_process_group()",
            **self._facts(call),
        )

    def other_size(self, call: Call, peer: int, sent_bytes: int, expected_bytes: int) -> TorshError:
        """A message that does not fill the tensor that receives it."""
        return TensorShapeMismatch(
            f"rank {peer} sent {sent_bytes} bytes, and the tensor that receives them has {expected_bytes}",
            hint="sender and receiver must agree on shape and dtype; in all_to_all also on the splits",
            peer=peer,
            sent_bytes=sent_bytes,
            expected_bytes=expected_bytes,
            **self._facts(call),
        )

    def reserved_tag(self, call: Call, tag: int, most: int) -> TorshError:
        """A tag beyond this MPI's limit, or reserved for the group's own messages."""
        return InvalidArgument(
            f"a tag must lie between 0 and {most} with this MPI",
            hint="use small tags; MPI promises no more than 32767",
            tag=tag,
            **self._facts(call),
        )

    def of_mpi(self, error: MPI.Exception, call: Call) -> TorshError:
        """An error that MPI reports."""
        kind = error.Get_error_class()
        message = error.Get_error_string().strip().splitlines()[0]
        if kind == self._mpi.ERR_TRUNCATE:
            return TensorShapeMismatch(
                f"{call.operation}: a rank sends more than this one expects, or another collective",
                hint="all ranks must call the same operations in the same order with the same sizes",
                mpi_error=message,
                **self._facts(call),
            )
        if kind in (getattr(self._mpi, "ERR_PROC_FAILED", None), getattr(self._mpi, "ERR_REVOKED", None)):
            return ProcessFailure(
                "a process of the group ended while the group needed it", mpi_error=message, **self._facts(call)
            )
        return BackendError(f"MPI reports an error in {call.operation}", mpi_error=message, **self._facts(call))
