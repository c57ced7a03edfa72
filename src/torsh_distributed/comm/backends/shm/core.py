"""The two cores of the shm backend, compiled and portable, under one interface."""

from __future__ import annotations

from typing import Any, Protocol

from torsh_distributed.native import SHM_CORE, load

Receipt = tuple[int, int, int, int]
"""A send or receive that ended: id, status, peer, bytes of the message."""


class Core(Protocol):
    """One rank's view of a segment; addresses and counts in, a status out (see `codes.Status`).

    Why addresses and not tensors: the compiled core does not use torch. The caller keeps the tensors alive.
    `is_background`: the calling thread must not spin while it waits.
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
        """Copy from the root, to each rank its own part."""

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
        """Start a send: its receipt if it is done already, None if it is pending, -status if it failed."""

    def receive(
        self, order: int, address: int, num_bytes: int, peer: int, tag: int, timeout_ns: int, /
    ) -> Receipt | int | None:
        """Start a receive, from any rank if `peer` is -1; returns as `send`."""

    def progress(self, is_background: bool, patience_ns: int, /) -> list[Receipt] | int:
        """Move messages until one is done or `patience_ns` is over; -status on failure. One thread at a time."""

    def join(self) -> None:
        """Mark this rank as present for the others."""

    def leave(self) -> None:
        """Mark this rank as gone for good and wake all sleeping ranks."""

    def poison(self, status: int, subject: int, text: str, /) -> None:
        """End the group for all ranks and wake the sleeping ones; the first call counts."""

    def failure(self) -> tuple[int, int, int, str] | None:
        """What ended the group: status, rank that saw it, rank it concerns, text. None while the group works."""

    def subject(self) -> int:
        """The rank that the last failure of a call here concerns, or -1."""

    def signature(self, rank: int, /) -> tuple[int, int, int, int, int]:
        """What a rank was called with in the current collective: operation, dtype, reduction, root, bytes."""

    def missing(self) -> list[int]:
        """The ranks that have not arrived where this rank waits."""


class NativeCore(Core, Protocol):
    """What only the compiled core does: exchange of rows, and tensors in memory that all ranks have mapped."""

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
        """Fold in place the tensors of all ranks, mapped here at these addresses; `number` identifies them."""

    def common(self, use: int, num_bytes: int, /) -> Any | None:
        """A writable buffer in the segment, freed when nothing refers to it; None if there is no room now."""

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
        """All-to-all of rows: gathered by the index at `sent`, added up by the one at `received`; 0 means none."""

    def is_unbegun(self) -> bool:
        """Whether the last collective failed before its first meeting was complete: no rank has written a result."""

    def max_row_bytes(self) -> int:
        """The longest row that `exchange_rows` takes."""


def load_native() -> Any | None:
    """The compiled core, if there is one; its `Group` is a `NativeCore`."""
    return load(SHM_CORE)
