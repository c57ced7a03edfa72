"""The two cores of the shm backend, compiled and portable, under one interface."""

from __future__ import annotations

from typing import Any, Protocol

from torsh_distributed.native import SHM_CORE, load

Receipt = tuple[int, int, int, int]
"""An order of point-to-point that ended: id, status, peer, bytes of the message."""


class Core(Protocol):
    """One rank's view of a segment; addresses and counts in, a status out (see `codes.Status`).

    Why addresses and not tensors: the compiled core knows no torch. The caller keeps the tensors alive. `is_background`
    says that the calling thread must not burn its core while it waits.
    """

    def barrier(self, timeout_ns: int, is_background: bool, /) -> int:
        """Meet all ranks."""

    def all_reduce(
        self, address: int, numel: int, dtype: int, reduction: int, timeout_ns: int, is_background: bool, /
    ) -> int:
        """Fold in place on every rank."""

    def reduce(
        self, address: int, numel: int, dtype: int, reduction: int, root: int, timeout_ns: int, is_background: bool, /
    ) -> int:
        """Fold in place on the root."""

    def reduce_scatter(
        self,
        out: int,
        sources: tuple[int, ...],
        numels: tuple[int, ...],
        dtype: int,
        reduction: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Fold one source per rank, keep this rank's."""

    def broadcast(
        self, address: int, num_bytes: int, dtype: int, root: int, timeout_ns: int, is_background: bool, /
    ) -> int:
        """Copy from the root."""

    def all_gather(
        self,
        outs: tuple[int, ...],
        num_bytes: tuple[int, ...],
        source: int,
        dtype: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from all to all."""

    def gather(
        self,
        outs: tuple[int, ...] | None,
        source: int,
        num_bytes: int,
        dtype: int,
        root: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from all to the root."""

    def scatter(
        self,
        out: int,
        sources: tuple[int, ...] | None,
        num_bytes: int,
        dtype: int,
        root: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from the root, to each its own."""

    def all_to_all(
        self,
        outs: tuple[int, ...],
        out_bytes: tuple[int, ...],
        sources: tuple[int, ...],
        source_bytes: tuple[int, ...],
        dtype: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from each to each."""

    def send(
        self, order: int, address: int, num_bytes: int, peer: int, tag: int, timeout_ns: int, /
    ) -> Receipt | int | None:
        """Start a send: its receipt if it is done at once, None if it is pending, -status if it failed."""

    def receive(
        self, order: int, address: int, num_bytes: int, peer: int, tag: int, timeout_ns: int, /
    ) -> Receipt | int | None:
        """Start a receive, from any rank if `peer` is -1; returns as `send`."""

    def progress(self, is_background: bool, patience_ns: int, /) -> list[Receipt] | int:
        """Move messages until some order is done or the patience is over; -status on failure. One thread at a time."""

    def join(self) -> None:
        """Show the others that this rank is here."""

    def leave(self) -> None:
        """Show the others that this rank will not come again, and wake all that sleep."""

    def poison(self, status: int, subject: int, text: str, /) -> None:
        """End the group for all ranks and wake all that sleep; the first call counts."""

    def failure(self) -> tuple[int, int, int, str] | None:
        """What ended the group: status, the rank that saw it, the rank it speaks of, words. None while it lives."""

    def subject(self) -> int:
        """The rank that the last failure of a call here speaks of, or -1."""

    def signature(self, rank: int, /) -> tuple[int, int, int, int, int]:
        """What a rank was called with in the current collective: operation, dtype, reduction, root, bytes."""

    def missing(self) -> list[int]:
        """The ranks that have not come to where this rank waits."""


class NativeCore(Core, Protocol):
    """The compiled core alone: rows gathered and added up on their way, tensors that lie where all ranks see them."""

    def all_reduce_shared(
        self,
        addresses: tuple[int, ...],
        number: int,
        numel: int,
        dtype: int,
        reduction: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Fold tensors of all ranks, which this rank sees at these addresses, in place; `number` is theirs alone."""

    def common(self, use: int, num_bytes: int, /) -> Any | None:
        """A writable buffer in the segment, given back when nothing refers to it; None if there is no room now."""

    def exchange_rows(
        self,
        out: int,
        num_out_rows: int,
        source: int,
        row_bytes: int,
        sent: int,
        is_sum: bool,
        received: int,
        weights: int,
        source_counts: tuple[int, ...],
        out_counts: tuple[int, ...],
        dtype: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy rows from each to each: gathered by the index at `sent`, added up by that at `received`; 0 is none."""

    def max_row_bytes(self) -> int:
        """The longest row that `exchange_rows` takes."""


def load_native() -> Any | None:
    """The compiled core, if there is one; `Core` says what its `Group` does."""
    return load(SHM_CORE)
