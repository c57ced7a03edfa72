"""The launcher's meters: a thread reads them, the launcher's loop passes on what they counted.

One launcher runs on each node, before the first worker and after the last: the energy of a node is counted once,
whatever happens to its workers.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torsh_distributed import upward
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.spec import JobSpec

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_MAX_RECORD_BYTES = 1 << 14


class EnergyWatch:
    """Reads the meters of this node until `close`; `take` gets their events as records, on the loop's thread."""

    def __init__(
        self,
        config: GreenConfig,
        spec: JobSpec,
        loop: Loop,
        output: LauncherOutput,
        *,
        take: Callable[[dict[str, Any]], None],
    ) -> None:
        self._loop = loop
        self._output = output
        self._take = take
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        visible = spec.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        self._meter = upward.load(upward.JOB_METER)(
            config,
            ranks=[place.rank for place in spec.places()],
            node=spec.node_rank,
            visible_gpus=visible,
            send=self._send,
        )
        loop.watch(self._ours.fileno(), self._hear)

    def _send(self, record: dict[str, Any]) -> None:
        """On the meter's thread."""
        data = json.dumps(record).encode()
        try:
            self._theirs.send(data[:_MAX_RECORD_BYTES], socket.MSG_DONTWAIT)
        except OSError:  # nobody has read for a long while, or the launcher ends
            return

    def _hear(self) -> None:
        while True:
            try:
                data = self._ours.recv(_MAX_RECORD_BYTES)
            except BlockingIOError:
                return
            record = json.loads(data)
            if record["type"] == "note":
                self._output.say(f"energy: {record['text']}")
            else:
                self._take(record)

    def close(self) -> None:
        """Read once more, pass that on, and stop."""
        self._meter.close()
        self._hear()
        self._loop.unwatch(self._ours.fileno())
        self._ours.close()
        self._theirs.close()
