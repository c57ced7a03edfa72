"""The lines of files that grow, possibly on another node: read what is there, then look again until the job is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_LOOK_AGAIN_S = 0.25


class GrowingFile:
    """Whole lines of one file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_byte = 0
        self._rest = b""

    def take_lines(self) -> list[str]:
        """The lines that were completed since the last call. A file that shrank was replaced, and is read anew."""
        try:
            size = self._path.stat().st_size
            if size < self._at_byte:
                self._at_byte, self._rest = 0, b""
            if size == self._at_byte:
                return []
            with self._path.open("rb") as file:
                file.seek(self._at_byte)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at_byte += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def take_rest(self) -> list[str]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def read_growing(
    paths: Callable[[], Sequence[Path]], *, follow: bool, is_over: Callable[[], bool], interval_s: float = _LOOK_AGAIN_S
) -> Iterator[str]:
    """Lines of the files in the order they are seen; with `follow` until `is_over`, then what is left.

    `paths` is asked again each time: an engine may add files, such as one for each attempt. Polls: files of other nodes
    on a network file system send no events.
    """
    files: dict[Path, GrowingFile] = {}
    pause = threading.Event()
    while True:
        # Asked before reading: what was written before the end is then in what follows.
        is_last = not follow or is_over()
        num_lines = 0
        for path in paths():
            for line in files.setdefault(path, GrowingFile(path)).take_lines():
                num_lines += 1
                yield line
        if is_last:
            break
        if not num_lines:
            pause.wait(interval_s)
    for file in files.values():
        yield from file.take_rest()
