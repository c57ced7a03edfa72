from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.worker_line import WorkerLine, why_silent
from torsh_distributed.launch.worker.launcher_line import FD_VARIABLE, MAX_MESSAGE_BYTES
from torsh_distributed.launch.worker.rank_status import raised_from, status_from

WORKER = """
import os, socket, sys, time
from torsh_distributed.launch.worker.launcher_line import open_line
line = open_line()
assert "TORSH_LINE_FD" not in os.environ
"""


class Listener:
    """Runs a worker with a line, in a loop, until it is told enough."""

    def __init__(self, script: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self.loop = Loop()
        self.line = WorkerLine(self.loop, self._take)
        self.on_message: Callable[[dict[str, Any]], None] = lambda _: None
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER + script],
            env={**os.environ, FD_VARIABLE: str(self.line.worker_fd)},
            pass_fds=(self.line.worker_fd,),
            stdin=subprocess.PIPE,  # which stays open: the script waits for a line that never comes
        )
        self.line.close_worker_end()

    def _take(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.on_message(message)

    def run(self) -> None:
        self.loop.call_later(20.0, lambda: self.loop.stop(1))
        assert self.loop.run() == 0, self.messages


@contextmanager
def listening(script: str) -> Iterator[Listener]:
    listener = Listener(script)
    try:
        yield listener
    finally:
        listener.process.kill()
        listener.process.communicate()
        listener.line.close()
        listener.loop.close()


def test_a_worker_answers_with_its_stack_and_tells_of_its_exception() -> None:
    script = """
def busy():
    try:
        raise KeyError("lr")
    except KeyError as error:
        line.report(error, how="uncaught")
    sys.stdin.readline()
busy()
"""
    with listening(script) as worker:

        def take(message: dict[str, Any]) -> None:
            if message["type"] == "raised":
                assert worker.line.ask()
            elif message["type"] == "status":
                worker.loop.stop(0)

        worker.on_message = take
        worker.run()
    hello, told, answer = worker.messages
    assert (hello["type"], hello["pid"]) == ("hello", worker.process.pid)
    raised = raised_from(told)
    assert raised is not None
    assert (raised.kind, raised.is_fatal, raised.summary) == ("KeyError", True, "KeyError: 'lr'")
    status = status_from(3, answer)
    assert status is not None
    assert status.waiting is None
    assert any("in busy" in line for line in status.stack)


def test_what_is_no_message_is_dropped_and_what_is_too_large_is_not_sent() -> None:
    script = f"""
line._sock.send(b"\\x80no json")
line._sock.send(b"[1, 2]")
line._sock.send(b'{{"type": 7}}')
line._sock.send(b"[" * 60000)
assert not line.send({{"type": "status", "text": "x" * {MAX_MESSAGE_BYTES}}})
assert line.send({{"type": "unheard-of"}})
if os.fork() == 0:
    os._exit(line.send({{"type": "from a child"}}))
assert os.wait()[1] == 0
line.send({{"type": "end"}})
"""
    with listening(script) as worker:
        worker.on_message = lambda message: worker.loop.stop(0) if message["type"] == "end" else None
        worker.run()
    assert [message["type"] for message in worker.messages] == ["hello", "unheard-of", "end"]


def test_what_a_worker_said_last_is_heard_although_it_left_a_question_unread() -> None:
    heard: list[dict[str, Any]] = []
    with Loop() as loop:
        line = WorkerLine(loop, heard.append)
        with socket.socket(fileno=os.dup(line.worker_fd)) as worker:
            line.close_worker_end()
            worker.send(b'{"type": "raised"}')
            worker.send(b'{"type": "bye"}')
            assert line.ask()
        line.drain()
        line.close()
    assert [message["type"] for message in heard] == ["raised", "bye"]


def test_unsound_messages_are_no_reports() -> None:
    assert raised_from({"how": "uncaught", "kind": 3, "message": "", "at_s": 1}) is None
    assert raised_from({"kind": "KeyError"}) is None
    assert status_from(0, {"groups": {"0": {"records": [["x"]]}}}) is None
    assert status_from(0, {"groups": 5}) is None
    assert status_from(0, {"groups": {}, "blocked": {"op": "all_reduce"}}) is None


def test_a_process_that_is_stopped_or_gone_is_said_to_be() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert why_silent(process.pid) == "it does not answer: it is stopped (SIGSTOP or a debugger)"
        process.kill()
        process.wait()
        assert why_silent(process.pid) == "it has ended"


def test_a_descriptor_that_is_no_line_is_left_alone(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    code = "from torsh_distributed.launch.worker.launcher_line import open_line; assert open_line() is None"
    env = {**os.environ, FD_VARIABLE: str(file)}
    done = subprocess.run([sys.executable, "-c", code], env=env, pass_fds=(file,), capture_output=True, check=False)
    os.close(file)
    assert done.returncode == 0, done.stderr
    assert json.dumps(os.environ.get(FD_VARIABLE)) == "null"
