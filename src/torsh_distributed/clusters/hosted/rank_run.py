"""One rank in a process of the engine: a function in the process itself, a script in a child of it.

A function shares the process with the engine, so data that the engine holds there need no copy; the process belongs to
this rank as long as it runs. A script runs as `torsh run` would start it: in a process of its own, whose signals,
standard output and exit code are its own, under a guardian that ends it with the engine's process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torsh_distributed import known_variables
from torsh_distributed.clusters.hosted.forked_rank import ForkedRank, RankForker, can_fork
from torsh_distributed.clusters.hosted.rank_host import EntryWork, FunctionWork, RankFailure, RankOutcome, RankTask
from torsh_distributed.clusters.hosted.rank_variables import rank_folder
from torsh_distributed.clusters.hosted.reporting import reporting_to
from torsh_distributed.comm.transport.packets import receive_packet
from torsh_distributed.comm.trust.job_secret import SECRET_FILE_VARIABLE, TOKEN_VARIABLE, write_secret_file
from torsh_distributed.errors import ProcessFailure
from torsh_distributed.launch.entry import check_entry, command_line
from torsh_distributed.launch.local.exit_causes import ExitStatus
from torsh_distributed.launch.local.guardian import MARK_VARIABLE, Guardian, kill_members
from torsh_distributed.launch.local.worker_variables import STARTUP_DIRECTORY
from torsh_distributed.launch.spec import EntryKind
from torsh_distributed.launch.worker.launcher_line import FD_VARIABLE, MAX_MESSAGE_BYTES, line_over
from torsh_distributed.launch.worker.raised_error import describe_error

Say = Callable[[Mapping[str, Any]], None]

PLAN_VARIABLE = "TORSH_PLAN"
_TERMINATE_S = 3.0
_KILL_S = 5.0
_MAX_TAIL_LINES = 20


class RankRun:
    """One rank: `run` blocks until it ends; `deliver` and `abort` may be called from other threads meanwhile."""

    def __init__(self, task: RankTask, *, say: Say, own_arguments: Mapping[str, Any] | None = None) -> None:
        """`say` takes what the rank says to the job; a script's lines of output are among it.

        `own_arguments` are what the host has for its rank alone: a function gets them by name.
        """
        self._task = task
        self._say = say
        self._own_arguments = dict(own_arguments or {})
        self._ours: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | ForkedRank | None = None
        self._forker: RankForker | None = None
        self._is_aborted = threading.Event()
        self._raised: dict[str, Any] | None = None

    def run(self) -> RankOutcome:
        """Run the rank to its end; whatever it raises is in the outcome."""
        with rank_folder() as folder:
            # In a file that only this user can read, for as long as the rank runs.
            secret_file = folder / "secret"
            write_secret_file(secret_file, self._task.secret)
            variables = {**self._task.variables, SECRET_FILE_VARIABLE: str(secret_file)}
            match self._task.work:
                case FunctionWork() as work:
                    with _environment(variables), self._line(), reporting_to(self._report):
                        return self._call(work)
                case EntryWork() as work:
                    if work.plan is not None:
                        name, text = work.plan
                        plan_file = folder / Path(name).name
                        plan_file.write_text(text)
                        variables[PLAN_VARIABLE] = str(plan_file)
                    return self._start(work, variables)

    def deliver(self, message: Mapping[str, Any]) -> None:
        """Hand a message of the job to the rank's line."""
        ours = self._ours
        if ours is None:
            return
        try:
            ours.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            # The rank ended a moment ago.
            return

    def abort(self, reason: str) -> None:
        """End the rank as far as that is possible: a script is killed, a function's collectives raise."""
        self._is_aborted.set()
        child, forker = self._child, self._forker
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        elif forker is not None:
            forker.cancel()
        elif isinstance(self._task.work, FunctionWork) and "torch" in sys.modules:
            from torsh_distributed.comm.groups.abort import abort_all

            abort_all(reason)

    # A function

    @contextlib.contextmanager
    def _line(self) -> Iterator[None]:
        """A line between the job and this process, in an elastic job; its messages pass through this object."""
        if not self._task.has_line:
            yield
            return
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        relay = threading.Thread(target=self._relay, args=(self._ours,), name="torsh-relay", daemon=True)
        relay.start()
        with line_over(theirs):
            try:
                yield
            finally:
                ours, self._ours = self._ours, None
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)
        relay.join()
        ours.close()

    def _relay(self, ours: socket.socket) -> None:
        """Read what the rank says until its end is closed."""
        while True:
            try:
                data = receive_packet(ours, MAX_MESSAGE_BYTES)
            except OSError:
                return
            if not data:
                return
            message = json.loads(data)
            if message.get("type") == "elastic":
                self._say(message)
            elif message.get("type") == "raised":
                self._raised = message

    def _report(self, metrics: Mapping[str, Any], checkpoint: str | None) -> None:
        self._say({"type": "report", "metrics": dict(metrics), "checkpoint": checkpoint})

    def _call(self, work: FunctionWork) -> RankOutcome:
        try:
            function, args, kwargs = importlib.import_module(work.pickler).loads(work.packed)
        except Exception as error:
            return RankOutcome(
                failure=RankFailure(
                    kind=type(error).__name__,
                    message=f"{work.name} cannot be unpacked on {socket.gethostname()}: {error}; "
                    "the code it needs must be installed there, or be carried by the engine",
                )
            )
        try:
            try:
                return RankOutcome(value=function(*args, **{**kwargs, **self._own_arguments}))
            finally:
                _leave_world()
        except SystemExit as error:
            if error.code in (None, 0):
                return RankOutcome()
            return RankOutcome(failure=_failure_of(error))
        except BaseException as error:
            return RankOutcome(failure=_failure_of(error))

    # A script

    def _start(self, work: EntryWork, variables: dict[str, str]) -> RankOutcome:
        mark = secrets.token_hex(8)
        env = {**_without_job(os.environ), **variables, MARK_VARIABLE: mark}
        if known_variables.whole_number("LOCAL_WORLD_SIZE", env) > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # as under `torsh run`
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP_DIRECTORY), env.get("PYTHONPATH"))))
        try:
            with _directory(work.working_dir):
                check_entry(work.entry)
        except (OSError, ValueError) as error:
            return RankOutcome(failure=_failure_of(error))
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guardian = Guardian(mark)
        sessions: list[int] = []
        try:
            try:
                with theirs:
                    child = self._child = self._child_of(work, env, theirs)
            except (OSError, ProcessFailure) as error:
                return RankOutcome(failure=_failure_of(error))
            sessions.append(child.pid)
            guardian.watch_session(child.pid)
            if self._is_aborted.is_set():  # before there was anything to end
                self.abort("the job ends")
            relay = threading.Thread(target=self._relay, args=(self._ours,), name="torsh-relay", daemon=True)
            relay.start()
            tail = self._pump(child)
            code = self._await_exit(child)
            self._ours.shutdown(socket.SHUT_RDWR)
            relay.join()
            return self._outcome(code, tail)
        finally:
            kill_members(mark, sessions, timeout_s=_KILL_S)
            guardian.close()
            if self._forker is not None:
                self._forker.close()
            self._ours.close()
            self._ours = None

    def _child_of(
        self, work: EntryWork, env: Mapping[str, str], line: socket.socket
    ) -> subprocess.Popen[bytes] | ForkedRank:
        """The rank's process: forked from its node's, or an interpreter of its own."""
        forked = self._fork(work, env, line)
        if forked is not None:
            return forked
        if self._is_aborted.is_set():
            raise ProcessFailure("the job ended before this rank had started")
        return subprocess.Popen(
            command_line(work.entry),
            env={**env, FD_VARIABLE: str(line.fileno())},
            cwd=work.working_dir,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(line.fileno(),),
        )

    def _fork(self, work: EntryWork, env: Mapping[str, str], line: socket.socket) -> ForkedRank | None:
        """None if the rank must have an interpreter of its own."""
        if work.entry.kind is EntryKind.COMMAND or work.own_interpreter or not can_fork(env):
            return None
        own = (*self._task.variables, SECRET_FILE_VARIABLE, PLAN_VARIABLE, MARK_VARIABLE)
        self._forker = RankForker(self._task.secret, env, own_variables=own)
        if self._is_aborted.is_set():
            return None
        argv = command_line(work.entry)[3:]
        return self._forker.fork(argv, env, cwd=work.working_dir or str(Path.cwd()), line=line.fileno())

    def _pump(self, child: subprocess.Popen[bytes] | ForkedRank) -> list[str]:
        """Show the output line by line until the pipe is closed; returns its last lines."""
        assert child.stdout is not None, "it was opened as a pipe"
        tail: list[str] = []
        with child.stdout:
            for line in child.stdout:
                text = line.decode(errors="replace").rstrip("\n")
                self._say({"type": "output", "line": text})
                tail = [*tail[1 - _MAX_TAIL_LINES :], text]
        return tail

    def _await_exit(self, child: subprocess.Popen[bytes] | ForkedRank) -> int:
        """The exit code; a script that was told to end and does not is killed."""
        while True:
            try:
                return child.wait(timeout=_TERMINATE_S)
            except subprocess.TimeoutExpired:
                if self._is_aborted.is_set():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)

    def _outcome(self, code: int, tail: list[str]) -> RankOutcome:
        if code == 0:
            return RankOutcome(value=0)
        status = ExitStatus(code)
        raised = self._raised
        if raised is None or code < 0:
            return RankOutcome(
                failure=RankFailure(
                    kind=status.describe(), message="", traceback="\n".join(tail), exit_code=status.shell_code
                )
            )
        return RankOutcome(
            failure=RankFailure(
                kind=str(raised.get("kind")),
                message=str(raised.get("message", "")),
                traceback=str(raised.get("full") or raised.get("traceback") or ""),
                exit_code=status.shell_code,
                is_consequence=bool(raised.get("is_consequence")),
            )
        )


def import_for_ranks() -> None:
    """Import torch and `td.init`, which take seconds, before the rank that needs them is there."""
    importlib.import_module("torsh_distributed.launch.worker.init")


def _failure_of(error: BaseException) -> RankFailure:
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # without the line of this file that called it
    described = describe_error(error, how="uncaught")
    code = error.code if isinstance(error, SystemExit) else 1
    return RankFailure(
        kind=str(described["kind"]),
        message=str(described["message"]),
        traceback=str(described["full"]),
        exit_code=code if isinstance(code, int) else 1,
        is_consequence=bool(described["is_consequence"]),
        error=_portable(error),
    )


def _portable(error: BaseException) -> BaseException | None:
    """The exception, if it survives a pickle: the job may run in another process."""
    import pickle

    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes, a line above
    except Exception:  # a user's exception may fail in any way; its text travels all the same
        return None
    return error if isinstance(copy, BaseException) else None


def _leave_world() -> None:
    """Take the process group down, so that the process can run another rank."""
    if "torch.distributed.distributed_c10d" in sys.modules:
        from torsh_distributed.comm.groups.process_group import destroy_process_group

        destroy_process_group()


def _without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of a job around this one."""
    return {name: value for name, value in environ.items() if name not in (SECRET_FILE_VARIABLE, TOKEN_VARIABLE)}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _directory(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with contextlib.chdir(path):
        yield
