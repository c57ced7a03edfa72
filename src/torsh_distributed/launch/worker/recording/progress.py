"""A rank's progress in a small file that outlives it, for the launcher's report on a dead rank.

The file is one record of 28 bytes, written with one pwrite: magic, last completed step, step of the last checkpoint,
saved or gone on from (-1: none yet), CRC-32 of what precedes, little-endian. A torn or foreign record fails the
checksum and reads as unknown.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torsh_distributed.errors import IoError
from torsh_distributed.private_files import open_private

if TYPE_CHECKING:
    from torsh_distributed.events import Event

_MAGIC = b"TORSHPRG"
_BODY = struct.Struct("<8sqq")
_RECORD = struct.Struct("<8sqqI")
_NONE = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """The last step a rank completed, and that of the last checkpoint: saved by it, or else what it went on from."""

    step: int | None = None
    checkpoint_step: int | None = None


def read_progress(path: str | Path) -> Progress:
    """What the rank wrote; unknown if it wrote nothing or something else."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return Progress()
    if len(data) != _RECORD.size:
        return Progress()
    magic, step, checkpoint_step, crc = _RECORD.unpack(data)
    if magic != _MAGIC or crc != zlib.crc32(data[: _BODY.size]):
        return Progress()
    return Progress(
        step=None if step == _NONE else step,
        checkpoint_step=None if checkpoint_step == _NONE else checkpoint_step,
    )


class ProgressWriter:
    """Keeps the record of this rank up to date from step and checkpoint events.

    One pwrite of 28 bytes per step (microseconds, page cache only): it survives the process, not the machine.
    `on_leaving` is called when the rank leaves its group because of an exception: here, because every subscription of
    its own would cost each collective a look.
    """

    def __init__(self, path: str | Path, *, on_leaving: Callable[[], None] | None = None) -> None:
        # Imported here: the launcher reads progress, and its first worker does not wait for the events.
        from torsh_distributed.events import CheckpointEvent, MembershipEvent, StepEvent, subscribe

        self.progress = Progress()
        try:
            self._fd = open_private(path, os.O_WRONLY)
        except OSError as error:
            raise IoError(
                "the progress file cannot be written",
                hint="TORSH_PROGRESS_FILE is set by `torsh run`; unset it if the job is started another way",
                path=str(path),
                reason=error.strerror or str(error),
            ) from error

        def take(event: Event) -> None:
            if isinstance(event, StepEvent):
                self.record(step=event.step)
            elif isinstance(event, CheckpointEvent) and event.error is None:
                # What training goes on from is the last checkpoint until it has saved one of its own.
                is_before = event.action in ("loaded", "found") and self.progress.checkpoint_step is None
                if event.action == "saved" or is_before:
                    self.record(checkpoint_step=event.step)
            elif isinstance(event, MembershipEvent) and event.action == "leaving" and on_leaving is not None:
                on_leaving()

        self._unsubscribe = subscribe(take, StepEvent, CheckpointEvent, MembershipEvent)

    def record(self, *, step: int | None = None, checkpoint_step: int | None = None) -> None:
        """Write the given numbers; the others stay."""
        known = self.progress
        self.progress = Progress(
            step=known.step if step is None else step,
            checkpoint_step=known.checkpoint_step if checkpoint_step is None else checkpoint_step,
        )
        if self._fd < 0:
            return
        body = _BODY.pack(_MAGIC, _or_none(self.progress.step), _or_none(self.progress.checkpoint_step))
        os.pwrite(self._fd, body + struct.pack("<I", zlib.crc32(body)), 0)

    def close(self) -> None:
        """Stop listening; the file stays. Closing twice does nothing."""
        self._unsubscribe()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _or_none(value: int | None) -> int:
    return _NONE if value is None else value
