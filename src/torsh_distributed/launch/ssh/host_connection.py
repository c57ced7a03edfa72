"""One host of a job: the ssh process to it, its output line by line, and what it is told."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from torsh_distributed.launch.local.exit_causes import peek_status
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.output import LineSplitter
from torsh_distributed.launch.local.terminal import StreamName, Terminal
from torsh_distributed.launch.ssh.ssh_client import RemoteHost

_READ_BYTES = 1 << 16
_KEPT_LINES = 20
_KILL_WAIT_S = 5.0
_PAUSE_S = 0.05


class HostConnection:
    """An ssh process in a session of its own, so that Ctrl-C at the terminal reaches only us.

    `on_end` is called once, with ssh's exit code, after all of its output.
    """

    def __init__(
        self,
        host: RemoteHost,
        command: Sequence[str],
        loop: Loop,
        terminal: Terminal,
        on_end: Callable[[HostConnection, int], None],
    ) -> None:
        self.host = host
        self.exit_code: int | None = None
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        """The end of its stderr: what ssh itself says is there."""
        self._loop = loop
        self._terminal = terminal
        self._on_end = on_end
        self._unsent = bytearray()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        assert self._process.stderr is not None, "a pipe was asked for"
        self._stdin: int | None = self._process.stdin.fileno()
        os.set_blocking(self._stdin, False)
        self._splitters: dict[StreamName, LineSplitter] = {}
        self._open: set[StreamName] = set()
        for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            self._watch(name, stream.fileno())  # type: ignore[arg-type]  # the two names of a StreamName
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.watch(self._pidfd, self._ended)

    @property
    def is_over(self) -> bool:
        """Whether ssh has ended."""
        return self.exit_code is not None

    def tell(self, line: bytes) -> None:
        """Queue a line for the host; dropped if its end of the pipe is gone."""
        if self._stdin is not None:
            self._unsent += line
            self._send()

    def _send(self) -> None:
        if self._stdin is None:
            return
        try:
            del self._unsent[: os.write(self._stdin, self._unsent)]
        except BlockingIOError:
            pass  # ssh has not connected yet, and the pipe is full: the loop calls again
        except BrokenPipeError:
            self._close_stdin()
            return
        if self._unsent:
            self._loop.watch(self._stdin, self._send, writable=True)
        else:
            self._loop.unwatch(self._stdin)

    def _watch(self, name: StreamName, fd: int) -> None:
        os.set_blocking(fd, False)
        self._splitters[name] = LineSplitter()
        self._open.add(name)
        self._loop.watch(fd, partial(self._read, name, fd))

    def _read(self, name: StreamName, fd: int) -> None:
        if self._terminal.is_full:
            # Not read, so that the host waits too; the loop stays free for signals.
            self._loop.unwatch(fd)
            self._loop.call_later(_PAUSE_S, partial(self._loop.watch, fd, partial(self._read, name, fd)))
            return
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        lines = self._splitters[name].feed(data) if data else self._splitters[name].finish()
        for line in lines:
            self._show(name, line)
        if not data:
            self._loop.unwatch(fd)
            self._open.discard(name)
            self._ended()

    def _show(self, name: StreamName, line: bytes) -> None:
        if name == "stderr":
            self.last_lines.append(line.decode(errors="replace"))
        self._terminal.post(name, line + b"\n")

    def _ended(self) -> None:
        status = peek_status(self._pidfd)
        if status is None or self.is_over:
            return
        self._loop.unwatch(self._pidfd)
        if self._open:
            return  # the end of its output comes first
        self._process.wait()
        self.exit_code = status.shell_code
        self._close_stdin()
        self._on_end(self, self.exit_code)

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            self._loop.unwatch(self._stdin)
            self._stdin = None
            assert self._process.stdin is not None, "a pipe was asked for"
            # The buffer is empty, as everything was written past it; a broken pipe has nothing more to say.
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                return

    def close(self) -> None:
        """End ssh at once."""
        self._close_stdin()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=_KILL_WAIT_S)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                self._loop.unwatch(stream.fileno())
                stream.close()
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
