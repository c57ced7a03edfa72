"""Commands to a running job: a Unix socket whose name has the job's, for this user alone.

The name is abstract: it has no file, so a launcher that is killed leaves nothing behind, and two jobs cannot have the
same one. One packet with a JSON object asks, one answers.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Self

from torsh_distributed.errors import CommunicationError, ConfigurationError, ProcessGroupNotFound
from torsh_distributed.launch.local.loop import Loop

_NAME = "\0torsh-run-{uid}-{run_id}"
_MAX_BYTES = 4096
_MAX_CALLERS = 8
_ANSWER_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")

JobCommand = Callable[[dict[str, Any]], dict[str, Any]]


class JobCommands:
    """The launcher's end, driven by its loop. `answer` turns a question into a reply."""

    def __init__(self, loop: Loop, run_id: str, answer: JobCommand) -> None:
        self._loop = loop
        self._answer = answer
        self._callers: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_NAME.format(uid=os.getuid(), run_id=run_id))
        except OSError as error:
            self._listener.close()
            raise ConfigurationError(
                f"a job called {run_id} runs on this machine already",
                hint="give this one another name with --rdzv-id",
                run_id=run_id,
            ) from error
        self._listener.setblocking(False)
        self._listener.listen(_MAX_CALLERS)
        loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:  # it left again
            return
        credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] not in (os.getuid(), 0) or len(self._callers) >= _MAX_CALLERS:
            caller.close()
            return
        caller.setblocking(False)
        self._callers.add(caller)
        self._loop.watch(caller.fileno(), lambda: self._serve(caller))

    def _serve(self, caller: socket.socket) -> None:
        try:
            question = json.loads(caller.recv(_MAX_BYTES) or b"null")
            if isinstance(question, dict):
                caller.send(json.dumps(self._answer(question)).encode())
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it left, or is no client of ours
            pass
        self._loop.unwatch(caller.fileno())
        self._callers.discard(caller)
        caller.close()

    def close(self) -> None:
        """Take no more commands."""
        for one in (self._listener, *self._callers):
            self._loop.unwatch(one.fileno())
            one.close()
        self._callers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask_job(run_id: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of the job called `run_id` on this machine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(_ANSWER_TIMEOUT_S)
        try:
            sock.connect(_NAME.format(uid=os.getuid(), run_id=run_id))
        except OSError as error:
            raise ProcessGroupNotFound(
                f"no elastic job called {run_id} runs on this machine",
                hint="its launcher says its name when it starts; ask on the machine of node 0",
                run_id=run_id,
                available_jobs=running_jobs(),
            ) from error
        try:
            sock.send(json.dumps(question).encode())
            reply = json.loads(sock.recv(_MAX_BYTES) or b"null")
        except (OSError, ValueError) as error:
            raise CommunicationError(f"the job {run_id} did not answer: {error}", run_id=run_id) from error
    if not isinstance(reply, dict):
        raise CommunicationError(f"the job {run_id} did not answer", run_id=run_id)
    return reply


def running_jobs() -> list[str]:
    """Names of this user's elastic jobs on this machine."""
    prefix = _NAME.format(uid=os.getuid(), run_id="").replace("\0", "@")
    with open("/proc/net/unix") as lines:  # noqa: PTH123 - read line by line
        names = [line.split()[-1] for line in lines]
    return sorted({name.removeprefix(prefix) for name in names if name.startswith(prefix)})
