"""Real ranks for tests: `world.run(function, *args, num_ranks=2)` returns results by rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bed.zygote import Outcome, Request, receive, send

ROOT = Path(__file__).parents[2]


class WorldError(AssertionError):
    """Some rank failed, died or hung; the message shows every such rank with its traceback and stacks."""

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
    """Runs functions on real processes forked from one that has torch imported."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._sock = ours
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", "from tests.bed.zygote import main; main()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env={**os.environ, **threads},
        )
        theirs.close()

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int = 2,
        backend: str | None = "gloo",
        timeout_s: float = 25.0,
        env: dict[str, str] | None = None,
    ) -> list[Outcome]:
        """How every rank ended, failures included: for tests that break things on purpose.

        `backend` names the process group set up around the call; None leaves that to the function,
        which finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
        """
        send(self._sock, Request(function, args, num_ranks, backend, timeout_s, env or {}))
        reply = receive(self._sock)
        if isinstance(reply, BaseException):
            raise reply
        return list(reply)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """The results by rank.

        If all failing ranks raised the same type, that exception is raised here with the report as a
        note, so that `pytest.raises` reads as in one process; otherwise a WorldError shows them all.
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
        """End the zygote."""
        self._sock.close()
        try:
            self._zygote.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
