"""A load test of the control plane: a thousand workers that only beat and listen, under a real launcher.

`launch_job` runs as it is; what starts its workers is replaced by a fork of the launcher, so a worker is a process of a
megabyte that speaks the real protocol over its real line. `beside_nodes` adds launchers of other nodes, which one
process plays over real, signed connections: in a job of that size the workers are on many nodes.

All note on one board in shared memory when they learned of a new world. The clock is the machine's own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.process_usage import cpu_s, peak_bytes
from torsh_distributed.comm.meeting.software_versions import own_software
from torsh_distributed.launch.control.spare_process import ForkedWorker
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes import node
from torsh_distributed.launch.nodes.heartbeat import HeartbeatSender
from torsh_distributed.launch.nodes.launcher_connection import LauncherConnection
from torsh_distributed.launch.nodes.records import (
    ChangeMembers,
    End,
    JoinRequest,
    MemberSaid,
    Message,
    Start,
)
from torsh_distributed.launch.spec import ElasticSpec, Entry, JobSpec

ROOT = Path(__file__).parents[1]  # not from `machine`: a launcher does not import torch
_SECRET = "the secret of a load test"
_RUN_ID = "load"
_BEAT_S = 0.1
_LIMIT_S = 120.0
_END_S = 30.0
_SETTLE_S = 1.0
_BUSY_S = 3.0
_RECORD = struct.Struct("=iiq")
"""Of each who listens: process, newest epoch (-1 before it is ready), when it arrived in nanoseconds."""


class Board:
    """One record for each worker of this node, then one for each other node."""

    def __init__(self, path: Path, num_records: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), num_records * _RECORD.size)

    @staticmethod
    def make(path: Path, num_records: int) -> Board:
        """A new board on which nobody is ready."""
        path.write_bytes(_RECORD.pack(0, -1, 0) * num_records)
        return Board(path, num_records)

    def note(self, number: int, epoch: int) -> None:
        """This process has learned of that world, now."""
        _RECORD.pack_into(self._memory, number * _RECORD.size, os.getpid(), epoch, time.monotonic_ns())

    def read(self, number: int) -> tuple[int, int, int]:
        """Process, epoch and time."""
        pid, epoch, at_ns = _RECORD.unpack_from(self._memory, number * _RECORD.size)
        return pid, epoch, at_ns


@dataclass(frozen=True, kw_only=True)
class ControlLoad:
    """What a job of that size asks of its launcher."""

    num_workers: int
    num_nodes: int
    known_s: list[float]
    """For each worker that was killed: until the last of the others knew."""
    median_known_s: float
    """Until half of them knew, in the median of the kills."""
    cpu_share: float
    """Of one core, while nothing happens but beats."""
    peak_bytes: int


def measure_load(*, num_nodes: int, nproc_per_node: int, num_kills: int, heartbeat_timeout_s: int = 1) -> ControlLoad:
    """Start a job of light workers, look at its launcher, kill some of them, and say how soon all others knew.

    A second of silence is what an elastic job allows a node; a busy machine may need more to play all of them.
    """
    num_listening = nproc_per_node + num_nodes - 1
    with tempfile.TemporaryDirectory(prefix="torsh-load-") as name:
        folder = Path(name)
        board = Board.make(folder / "board", num_listening)
        (folder / "worker.py").write_text("raise SystemExit('workers are forked, not started')\n")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        arguments = [name, *map(str, (num_nodes, nproc_per_node, port, heartbeat_timeout_s))]
        started: list[subprocess.Popen[str]] = []
        with (folder / "output").open("w") as output:
            for part in ("launcher", "nodes") if num_nodes > 1 else ("launcher",):
                command = [sys.executable, "-m", __spec__.name, part, *arguments]
                started.append(
                    subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True, start_new_session=True)
                )
        try:
            return _watch(board, started, num_nodes, nproc_per_node, num_kills)
        except (TimeoutError, ChildProcessError) as error:
            raise RuntimeError(f"{error}:\n{(folder / 'output').read_text()[-3000:]}") from error
        finally:
            _end(started)


def _end(started: Sequence[subprocess.Popen[str]]) -> None:
    """End all; a launcher ends its workers, who also end by themselves when it is gone."""
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(
    board: Board, started: Sequence[subprocess.Popen[str]], num_nodes: int, nproc_per_node: int, num_kills: int
) -> ControlLoad:
    launcher = started[0].pid
    everyone = list(range(nproc_per_node + num_nodes - 1))
    _wait_until(lambda: all(board.read(number)[1] >= 0 for number in everyone), started)
    time.sleep(_SETTLE_S)
    before_s, start_s = cpu_s(launcher), time.monotonic()
    time.sleep(_BUSY_S)
    cpu_share = (cpu_s(launcher) - before_s) / (time.monotonic() - start_s)
    last_s, median_s = [], []
    for number in range(num_kills):
        # From the end: rank 0 is the last to go.
        victim = nproc_per_node - 1 - number
        everyone.remove(victim)
        killed_ns = time.monotonic_ns()
        os.kill(board.read(victim)[0], signal.SIGKILL)
        _wait_until(lambda: all(board.read(other)[1] > number for other in everyone), started)  # noqa: B023 (within the loop)
        took = [(board.read(other)[2] - killed_ns) * 1e-9 for other in everyone]
        last_s.append(max(took))
        median_s.append(statistics.median(took))
        time.sleep(2 * _BEAT_S)
    return ControlLoad(
        num_workers=num_nodes * nproc_per_node,
        num_nodes=num_nodes,
        known_s=last_s,
        median_known_s=statistics.median(median_s),
        cpu_share=cpu_share,
        peak_bytes=peak_bytes(launcher),
    )


def _wait_until(is_so: Callable[[], bool], started: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for it; raises if it does not come, or as soon as one of the processes that it needs has ended."""
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        for process in started:
            if process.poll() is not None:
                raise ChildProcessError(f"{process.args} ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all knew within {_LIMIT_S:g} s")
        time.sleep(0.005)


# The launcher and its workers


class LightSpare:
    """In place of the warm spare: forks the launcher itself, and the child is a worker that only beats and listens."""

    board: Board

    def __init__(self, *_: object, variables: Mapping[str, str]) -> None:
        gc.collect()
        gc.freeze()  # children share these pages, and do not write to them

    def start(
        self, command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int, line: int
    ) -> ForkedWorker:
        """Fork a worker; it keeps its line alone."""
        pid = os.fork()
        if pid:
            return ForkedWorker(pid)
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(line, 3)
            os.closerange(4, 1 << 16)
            _be_worker(socket.socket(fileno=3), int(env["TORSH_MEMBER"]), self.board)
        finally:
            os._exit(1)

    def keep_warm_beside(self, pids: Sequence[int]) -> None:
        """Nothing to warm."""

    def close(self) -> None:
        """Nothing to end."""


def _be_worker(line: socket.socket, member: int, board: Board) -> None:
    """Say that it trains, beat, and enter each world it is told of."""

    def tell(**message: object) -> None:
        line.send(json.dumps({"at_s": time.time(), **message}).encode())

    tell(type="hello", pid=os.getpid())
    tell(type="elastic", what="ready")
    board.note(member, 0)
    poller = select.poll()
    poller.register(line, select.POLLIN)
    next_s = time.monotonic() + _BEAT_S * (member % 100) / 100  # real workers do not beat in step either
    while True:
        if poller.poll(max(0.0, next_s - time.monotonic()) * 1e3):
            data = line.recv(1 << 16)
            if not data:
                return
            arrived = json.loads(data)
            if arrived["type"] == "view":
                board.note(member, arrived["epoch"])
                tell(type="elastic", what="entered", epoch=arrived["epoch"])
        if time.monotonic() >= next_s:
            next_s += _BEAT_S
            tell(type="beat")


def _launch(folder: Path, num_nodes: int, nproc_per_node: int, port: int, heartbeat_timeout_s: int) -> int:
    LightSpare.board = Board(folder / "board", nproc_per_node + num_nodes - 1)
    with patch.object(node, "SpareProcess", LightSpare):
        return launch_job(
            JobSpec(
                entry=Entry(target=str(folder / "worker.py")),
                nproc_per_node=nproc_per_node,
                nnodes=num_nodes,
                master_port=port if num_nodes > 1 else None,
                run_id=_RUN_ID,
                token=_SECRET,
                heartbeat_timeout_s=heartbeat_timeout_s,
                elastic=ElasticSpec(on_loss="shrink", max_workers=num_nodes * nproc_per_node),
            )
        )


# Launchers of other nodes


class LightNode:
    """A launcher of another node, without workers: it joins, says that they train, and enters worlds for them."""

    def __init__(self, loop: Loop, board: Board, request: JoinRequest, *, port: int) -> None:
        self._loop, self._board = loop, board
        self._node_rank, self._nproc = request.node_rank, request.nproc_per_node
        self._place = self._nproc + self._node_rank - 1
        self._connection = LauncherConnection(loop, _connect(port), _SECRET, is_server=False)
        self._connection.on_message = self._receive
        self._connection.on_close = self._end
        self._connection.send(request)

    def beat(self) -> None:
        """Give a sign of life."""
        self._connection.beat()

    def _end(self, reason: str) -> None:
        print(f"node {self._node_rank}: {reason}", file=sys.stderr)
        self._loop.stop(1)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Start):
            self._board.note(self._place, 0)
            self._say("ready", message.attempt, 0)
        elif isinstance(message, ChangeMembers):
            self._board.note(self._place, message.epoch)
            # Later: on real nodes this does not delay the others.
            self._loop.call_later(0, lambda: self._say("entered", message.attempt, message.epoch))
        elif isinstance(message, End):
            self._loop.stop(0)

    def _say(self, what: str, attempt: int, epoch: int) -> None:
        first = self._node_rank * self._nproc
        for member in range(first, first + self._nproc):
            self._connection.send(MemberSaid(attempt=attempt, member=member, what=what, epoch=epoch))


def _request(node_rank: int, num_nodes: int, nproc_per_node: int) -> JoinRequest:
    return JoinRequest(
        node_rank=node_rank,
        node_name=f"node{node_rank}",
        nnodes=num_nodes,
        nproc_per_node=nproc_per_node,
        max_restarts=0,
        run_id=_RUN_ID,
        **asdict(own_software()),
        clock_s=time.time(),
    )


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + _LIMIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _be_nodes(folder: Path, num_nodes: int, nproc_per_node: int, port: int, heartbeat_timeout_s: int) -> int:
    board = Board(folder / "board", nproc_per_node + num_nodes - 1)
    with Loop() as loop:
        nodes = [
            LightNode(loop, board, _request(rank, num_nodes, nproc_per_node), port=port) for rank in range(1, num_nodes)
        ]

        def beat() -> None:
            for one in nodes:
                one.beat()

        # One thread beats for all: real launchers have one each, on machines of their own.
        heartbeat = HeartbeatSender(loop, heartbeat_timeout_s, send=beat, check=lambda: None)
        try:
            return loop.run()
        finally:
            heartbeat.stop()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with whoever measures
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    play = _launch if sys.argv[1] == "launcher" else _be_nodes
    sys.exit(play(Path(sys.argv[2]), *map(int, sys.argv[3:])))
