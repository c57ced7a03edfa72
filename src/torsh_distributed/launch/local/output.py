"""Workers' output: read from their pipes, printed line by line after the rank, kept in files.

One thread does all of it, so a paused terminal or a slow file system never keeps the launcher from supervising.
Back-pressure still reaches the workers: their pipes fill up.
"""

from __future__ import annotations

import io
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torsh_distributed.errors import IoError
from torsh_distributed.launch.local.terminal import StreamName, Terminal
from torsh_distributed.private_files import make_private_directories, open_private
from torsh_distributed.terminal_text import neutral_output

_COLOURS = ("36", "33", "32", "35", "34", "31", "96", "93", "92", "95", "94", "91")
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class LinePrefix:
    """The text before every line of a rank, coloured by rank or not."""

    rank: int
    width: int
    is_coloured: bool
    is_raw: bool = False
    """Whether control characters of the worker reach the terminal."""

    def apply(self, line: bytes) -> bytes:
        """The line as printed. A colour that the worker left on ends with the line."""
        label = f"[rank {self.rank:>{self.width}}]"
        line = line if self.is_raw else neutral_output(line)
        if not self.is_coloured:
            return label.encode() + b" " + line + b"\n"
        reset = b"\x1b[0m" if b"\x1b" in line else b""
        return f"\x1b[{_COLOURS[self.rank % len(_COLOURS)]}m{label}\x1b[0m ".encode() + line + reset + b"\n"


def wants_colour(*, is_tty: bool, environ: Mapping[str, str]) -> bool:
    """Whether to colour: on terminals, unless NO_COLOR (https://no-color.org) is set or the terminal is dumb."""
    return is_tty and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class LineSplitter:
    """Cuts a byte stream into lines at newlines and carriage returns (progress bars); over-long ones are cut too."""

    # A carriage return at the very end may be half of a line end: it waits for the next byte.
    _LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        buffer = self._rest + data
        lines = []
        start = 0
        for match in self._LINE_END.finditer(buffer):
            # A progress bar begins with a carriage return, which is not an empty line.
            if match.start() > start or match.group() != b"\r":
                lines.append(buffer[start : match.start()])
            start = match.end()
        self._rest = buffer[start:]
        while len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        return lines

    def finish(self) -> list[bytes]:
        """What is left without a line end."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


class InterruptFilter:
    """Takes the tracebacks of KeyboardInterrupt out of a stream of lines, and leaves everything else as it is.

    Why: after Ctrl-C every worker prints one, from wherever it was; nobody reads them. A traceback is held back until
    its end shows whether it is one, chained exceptions included. An import that was interrupted may end as ImportError.
    """

    _STARTS = (b"Traceback (most recent call last):", b"Exception ignored in", b"Fatal Python error: init_")
    _LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
    _CAUSED = (b"KeyboardInterrupt", b"ImportError")
    _INSIDE = (b" ", b"Python runtime state:", b"Current thread", b"<no Python frame>")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._is_interrupt = False
        self._has_ended = False

    def feed(self, line: bytes) -> list[bytes]:
        """The lines that can be shown now."""
        if self._has_ended and line.startswith(self._STARTS):
            return [*self.finish(), *self.feed(line)]
        is_start = line.startswith((*self._STARTS, *self._LINKS))
        if not self._held and not is_start:
            # Without a frame there is no traceback, only the name.
            return [] if line.strip() == b"KeyboardInterrupt" else [line]
        if is_start or not line.strip() or (not self._has_ended and line.startswith(self._INSIDE)):
            self._has_ended = self._has_ended and not is_start
            self._held.append(line)
            return []
        if not self._has_ended:
            # The first line that is not indented names the exception.
            self._has_ended = True
            self._is_interrupt = self._is_interrupt or line.startswith(self._CAUSED)
            self._held.append(line)
            return []
        return [*self.finish(), *self.feed(line)]

    def finish(self) -> list[bytes]:
        """What is still held back, if it is to be shown."""
        held, is_interrupt = self._held, self._is_interrupt
        self._held, self._is_interrupt, self._has_ended = [], False, False
        return [] if is_interrupt else held


@dataclass(slots=True)
class _WorkerStream:
    rank: int
    name: StreamName
    fd: int
    prefix: LinePrefix | None
    log: io.FileIO | None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    interrupts: InterruptFilter = field(default_factory=InterruptFilter)


def open_log(directory: Path, rank: int, name: StreamName) -> io.FileIO:
    """The log file of one stream of one rank, opened for appending; this user alone can read it.

    Creates its directory, DIR/RUN/attempt-N, of which the last two are the job's own.
    """
    path = directory / f"rank-{rank}.{name}.log"
    try:
        make_private_directories(directory.parent.parent, directory.parent.name, directory.name)
        return io.FileIO(path, "ab", opener=open_private)
    except OSError as error:
        raise IoError(
            "the log directory cannot be written",
            hint="choose a --log-dir this user may write, with space left",
            path=str(path),
            reason=error.strerror or str(error),
        ) from error


class OutputPump:
    """Owns the read ends of all workers' pipes. `warn` is called from the pump's thread with a line for the user."""

    def __init__(self, terminal: Terminal, *, warn: Callable[[str], None]) -> None:
        self._terminal = terminal
        self._warn = warn
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._incoming: list[_WorkerStream] = []
        self._notes: list[tuple[int, str, bool]] = []
        self._errors: dict[int, _WorkerStream] = {}
        self._open: dict[int, set[StreamName]] = {}
        self._tails: dict[int, deque[str]] = {}
        self._is_closing = False
        self._hides_interrupts = False
        self._thread = threading.Thread(target=self._run, name="torsh-output", daemon=True)
        self._thread.start()

    def add(self, rank: int, name: StreamName, fd: int, *, prefix: LinePrefix | None, log: io.FileIO | None) -> None:
        """Take ownership of a pipe's read end and its log file; without a prefix nothing is printed."""
        with self._changed:
            self._incoming.append(_WorkerStream(rank, name, fd, prefix, log))
            self._open.setdefault(rank, set()).add(name)
            self._tails[rank] = deque(maxlen=_TAIL_LINES)
        os.write(self._wake_write, b"+")

    def note(self, rank: int, text: str, *, is_shown: bool) -> None:
        """Add a text to the rank's stderr that it left to the launcher to print; to its log in any case."""
        with self._changed:
            self._notes.append((rank, text, is_shown))
        os.write(self._wake_write, b"+")

    def wait_ended(self, ranks: set[int], *, timeout_s: float) -> bool:
        """Whether all pipes of these ranks ended in time; a grandchild may hold one open."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._open.get(rank) for rank in ranks), timeout_s)

    def hide_interrupts(self) -> None:
        """From now on, show no traceback of KeyboardInterrupt: the user asked for the end. Logs have them."""
        self._hides_interrupts = True

    def tail(self, rank: int) -> tuple[str, ...]:
        """The last lines of the rank's stderr."""
        with self._changed:
            return tuple(self._tails.get(rank, ()))

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Read the rest, close every pipe and log. Waits at most `timeout_s` for a blocked terminal."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._is_closing:
                return
            self._changed.wait_for(lambda: not any(self._open.values()), timeout_s)
            self._is_closing = True
        os.write(self._wake_write, b"x")
        self._thread.join(max(0.1, deadline - time.monotonic()))
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    self._take_incoming()
                else:
                    self._read(key.data)
            with self._changed:
                if self._is_closing:
                    break
        self._take_incoming()  # a note that came after the last look
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.data)
        self._selector.close()

    def _take_incoming(self) -> None:
        with self._changed:
            streams, self._incoming = self._incoming, []
            notes, self._notes = self._notes, []
        for stream in streams:
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            if stream.name == "stderr":
                self._errors[stream.rank] = stream
        for rank, text, is_shown in notes:
            self._add_note(self._errors[rank], text, is_shown=is_shown)

    def _add_note(self, stream: _WorkerStream, text: str, *, is_shown: bool) -> None:
        has_ended = stream.log is not None and stream.log.closed
        if stream.log is not None and has_ended:
            try:
                stream.log = io.FileIO(stream.log.name, "ab")
            except OSError as error:
                self._warn(f"{stream.log.name} is incomplete from here: {error.strerror}")
                stream.log = None
        self._keep(stream, text.encode(errors="replace"))
        if stream.log is not None and has_ended:
            stream.log.close()
        if is_shown and stream.prefix is not None:
            lines = [line.encode(errors="replace") for line in text.splitlines()]
            self._terminal.write("stderr", b"".join(map(stream.prefix.apply, lines)))

    def _read(self, stream: _WorkerStream) -> None:
        data = os.read(stream.fd, _READ_BYTES)
        if data:
            self._keep(stream, data)
            self._show(stream, stream.splitter.feed(data))
        else:
            self._end(stream)

    def _keep(self, stream: _WorkerStream, data: bytes) -> None:
        if stream.log is None:
            return
        try:
            while data:
                data = data[stream.log.write(data) or 0 :]
        except OSError as error:
            self._warn(f"{stream.log.name} is incomplete from here: {error.strerror}")
            stream.log.close()
            stream.log = None

    def _show(self, stream: _WorkerStream, lines: list[bytes]) -> None:
        if stream.name == "stderr":
            with self._changed:
                self._tails[stream.rank].extend(line.decode(errors="replace") for line in lines if line.strip())
        if self._hides_interrupts and stream.name == "stderr":
            lines = [shown for line in lines for shown in stream.interrupts.feed(line)]
        self._write(stream, lines)

    def _write(self, stream: _WorkerStream, lines: list[bytes]) -> None:
        if stream.prefix is not None and lines:
            self._terminal.write(stream.name, b"".join(map(stream.prefix.apply, lines)))

    def _end(self, stream: _WorkerStream) -> None:
        self._show(stream, stream.splitter.finish())
        self._write(stream, stream.interrupts.finish())
        self._selector.unregister(stream.fd)
        os.close(stream.fd)
        if stream.log is not None and not stream.log.closed:
            stream.log.close()
        with self._changed:
            self._open[stream.rank].discard(stream.name)
            self._changed.notify_all()
