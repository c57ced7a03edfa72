"""A launcher's link to the process that observes its job: summaries of ranks go in, lines for people come out.

Nothing here may hold up the launcher or end the job: what cannot be passed on is dropped, and an observer that fails is
a warning.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.spec import JobSpec
from torsh_distributed.observe.secret_mask import SecretMask
from torsh_distributed.observe.serving.observer_process import ObserverProcess
from torsh_distributed.observe.settings import ObserveSettings


class JobObserver:
    """At most one observer process for the job on this node; started by the command line or by a worker's plan."""

    def __init__(
        self, spec: JobSpec, loop: Loop, output: LauncherOutput, *, on_change: Callable[[str, str], None]
    ) -> None:
        """`on_change` takes a change of the plan that a rule asks for, as JSON, and the reason."""
        self._spec = spec
        self._loop = loop
        self._output = output
        self._on_change = on_change
        self._process: ObserverProcess | None = None
        self._unsubscribe: Callable[[], None] = _nothing
        if spec.observe.is_active:
            self._begin(spec.observe)

    @property
    def is_active(self) -> bool:
        """Whether anybody looks."""
        return self._process is not None

    def take(self, rank: int, message: dict[str, Any]) -> None:
        """Take a summary of a rank, or a worker's wish to be observed; rank -1 for what a node has counted."""
        if message.get("type") == "observe":
            self._take_wish(message)
        elif self._process is not None and rank < 0:  # of a node
            self._process.send(message)
        elif self._process is not None:
            # In an elastic job the worker's number stays while its rank changes; only the worker knows its rank.
            self._process.send(message if self._spec.elastic is not None else {**message, "rank": rank})

    def tell_end(self, exit_code: int, *, attempt: int) -> None:
        """The job has ended; told before its report is written."""
        if self._process is not None:
            told = {"action": "ended", "attempt": attempt, "detail": f"exit code {exit_code}", "exit_code": exit_code}
            self._process.send({"type": "membership", **told})

    def _take_membership(self, event: Any) -> None:
        """Workers were started or lost, or an elastic world has other members: from the bus of this launcher."""
        if self._process is not None and event.action != "ended":  # which `tell_end` has told
            told = {"action": event.action, "detail": event.detail, "world_size": event.world_size}
            # In an elastic world the number is that of its epoch.
            if event.action in ("started", "restarted"):
                told["attempt"] = event.attempt
            self._process.send({"type": "membership", **told})

    def finish(self, *, timeout_s: float) -> None:
        """The job has ended: wait for the report, and show where it is."""
        process, self._process = self._process, None
        if process is not None:
            self._unsubscribe()
            self._loop.unwatch(process.reports.fileno())
            process.finish(self._show, timeout_s=timeout_s)

    def close(self) -> None:
        """End the process at once, if it still runs."""
        process, self._process = self._process, None
        if process is not None:
            self._unsubscribe()
            self._loop.unwatch(process.reports.fileno())
            process.close()

    def _take_wish(self, message: dict[str, Any]) -> None:
        if self._process is not None:
            return
        try:
            wanted = ObserveSettings.from_dict(message)
        except InvalidArgument as error:
            self._output.warn(f"a worker's request to be observed is not understood: {error.message}")
            return
        if wanted.is_active:
            self._begin(wanted)

    def _begin(self, settings: ObserveSettings) -> None:
        if not self._spec.is_leader:
            # The page, the report and the exports of all nodes are those of node 0; each node has its own metrics page.
            settings = dataclasses.replace(
                settings, page_port=None, report=None, exports=(), alert_rules=None, energy=False
            )
            if not settings.is_active:
                return
        try:
            self._process = ObserverProcess(dataclasses.replace(settings, can_change_plan=True))
        except OSError as error:
            self._output.warn(f"the job is not observed: {error.strerror or error}")
            return
        self._loop.watch(self._process.reports.fileno(), self._hear)
        # Imported here: it takes a while, and a job that nobody looks at does without.
        from torsh_distributed.events import MembershipEvent, subscribe

        self._unsubscribe = subscribe(self._take_membership, MembershipEvent)
        entry = self._spec.entry
        self._process.send(
            {
                "type": "job",
                "run_id": self._spec.run_id,
                "command": SecretMask(os.environ).command([entry.target, *entry.args]),
                "world_size": self._spec.world_size if self._spec.elastic is None else None,
                "num_nodes": self._spec.nnodes,
                "node": socket.gethostname(),
            }
        )

    def _hear(self) -> None:
        process = self._process
        assert process is not None, "unwatched when it ends"
        for kind, text in process.take_reports():
            if kind == "change":
                change, _, reason = text.partition("\n")
                self._on_change(change, reason)
            else:
                self._show(kind, text)
        if process.is_over:
            self._output.warn("the process that observes the job has ended; training goes on")
            self.close()

    def _show(self, kind: str, text: str) -> None:
        if kind == "warned":
            self._output.warn(text)
        elif kind == "said":
            self._output.say(text)


def _nothing() -> None:
    """Nothing to unsubscribe from."""
