"""Real ranks for tests: `world.run(function, *args, num_ranks=2)` returns results by rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bed.zygote import Outcome, Request, receive, send
from tests.lab.network import Host

ROOT = Path(__file__).parents[2]
ZYGOTES: set[int] = set()
"""Pids of zygotes in use, the only processes that may outlive a test."""


class WorldError(AssertionError):
    """A rank failed, died or hung; the message shows every such rank with its traceback and stacks."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__("\n\n".join(_describe(outcome) for outcome in outcomes if not outcome.is_ok))


def _describe(outcome: Outcome) -> str:
    if outcome.exit_code is None:
        what = "hung; its stacks when the deadline passed:\n" + outcome.stacks
    elif outcome.error is not None:
        what = f"raised {type(outcome.error).__name__}\n{outcome.trace}"
    elif outcome.exit_code < 0:
        what = f"was ended by signal {-outcome.exit_code}\n{outcome.stacks}"
    else:
        what = f"exited with code {outcome.exit_code}"
    tail = "\n".join(outcome.output.splitlines()[-20:])
    return f"--- rank {outcome.rank} {what}" + (f"\noutput:\n{tail}" if tail else "")


class World:
    """Runs functions on real processes, forked from one that has already imported torch."""

    def __init__(self, *, is_light: bool = False) -> None:
        """`is_light`: the process imports torch and nothing more, for tests of this class that start several."""
        self._is_light = is_light
        self._sock: socket.socket | None = None
        self._zygote: subprocess.Popen[bytes] | None = None

    def _connect(self) -> socket.socket:
        """Start the zygote when it is first needed, and again after an interrupted exchange."""
        if self._sock is None:
            ours, theirs = socket.socketpair()
            # Inductor would start a pool of compilers in every rank.
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            # Few and large pages: a fork copies the table of them. The zygote takes both back for what it starts.
            pages = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
            self._zygote = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from tests.bed.zygote import main; main()",
                    str(theirs.fileno()),
                    str(int(self._is_light)),
                ],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, **threads, **pages},
            )
            theirs.close()
            self._sock = ours
            ZYGOTES.add(self._zygote.pid)
        return self._sock

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int = 2,
        backend: str | None = "gloo",
        timeout_s: float = 60.0,
        env: dict[str, str] | None = None,
        hosts: Sequence[Host] = (),
        imports: tuple[str, ...] = (),
    ) -> list[Outcome]:
        """How every rank ended, including failures: for tests that break things on purpose.

        `backend` is that of the process group set up around the call; None leaves that to the function,
        which finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
        `hosts` puts each rank on a host of the lab, by rank: `[a, a, b, b]` is two nodes of two.
        `imports`: heavy modules that the ranks need; they are imported once, before the ranks are forked.
        """
        places = tuple(host.place for host in hosts)
        if places and len(places) != num_ranks:
            raise ValueError(f"{len(places)} hosts for {num_ranks} ranks: name the host of every rank")
        request = Request(function, args, num_ranks, backend, timeout_s, env or {}, places, imports)
        try:
            reply = self._exchange(request)
        except BaseException:
            # Interrupted: a late reply must not be taken for the answer to the next request.
            self.close()
            raise
        if isinstance(reply, BaseException):
            raise reply
        return list(reply)

    def _exchange(self, request: Request) -> Any:
        sock = self._connect()
        send(sock, request)
        try:
            return receive(sock)
        except EOFError as error:
            raise RuntimeError("the process that forks the ranks is gone; its output says why") from error

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """The results by rank.

        If all failing ranks raised the same type, that exception is raised here with the report as a
        note, so `pytest.raises` reads as in one process; otherwise a WorldError shows them all.
        """
        outcomes = self.outcomes(function, *args, **options)
        failed = [outcome for outcome in outcomes if not outcome.is_ok]
        if not failed:
            return [outcome.value for outcome in outcomes]
        report = WorldError(outcomes)
        first = failed[0].error
        if first is not None and all(type(outcome.error) is type(first) for outcome in failed):
            first.add_note(str(report))
            raise first
        raise report

    def close(self) -> None:
        """End the zygote and any rank that still runs."""
        if self._sock is None or self._zygote is None:
            return
        self._sock.close()
        self._sock = None
        try:
            self._zygote.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        ZYGOTES.discard(self._zygote.pid)
