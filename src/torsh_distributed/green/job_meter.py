"""Reads the meters of a node while a job runs, on a thread of the launcher, or of local rank 0 without one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from torsh_distributed import events
from torsh_distributed.green.meters.node_meter import NodeMeter

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_log = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], None]
"""Takes a record: an event as JSON, or `{"type": "note", "text": …}` for people."""


class JobMeter:
    """One node's energy from now on until `close`, which reads once more. Trouble is a note, never an exception."""

    def __init__(
        self, config: GreenConfig, *, ranks: Sequence[int], node: int, visible_gpus: str = "", send: Send
    ) -> None:
        self._node = node
        self._interval_s = config.interval_s
        self._send = send
        self._meter = NodeMeter(ranks, now_s=time.monotonic(), visible_gpus=visible_gpus, full_w=config.node_full_w)
        self._num_noted = 0
        self._told: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._note()
        self._thread = threading.Thread(target=self._run, name="torsh-energy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._read()

    def _read(self) -> None:
        try:
            with self._lock:
                readings = self._meter.read(time.monotonic())
        except Exception:  # a driver's library may raise anything: the job goes on
            _log.exception("the meters could not be read; the job goes on without them")
            self._closing.set()
            return
        for one in readings:
            if one.duration_s <= 0:
                continue
            event = events.EnergyEvent(
                rank=-1,
                node=self._node,
                meter=one.meter,
                source=one.source,
                is_measured=one.is_measured,
                joules=one.joules,
                duration_s=one.duration_s,
                ranks=one.ranks,
                # The formula of an estimate is told once.
                detail=None if one.detail == self._told.get(one.meter) else one.detail,
            )
            self._told[one.meter] = one.detail
            self._send(events.to_record(event))
        self._note()

    def _note(self) -> None:
        new, self._num_noted = self._meter.notes[self._num_noted :], len(self._meter.notes)
        for text in new:
            self._send({"type": "note", "text": text})

    def close(self) -> None:
        """Read once more and stop; closing again does nothing."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(timeout=2 * self._interval_s)
            self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
