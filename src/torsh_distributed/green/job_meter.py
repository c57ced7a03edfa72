"""Reads the meters of a node while a job runs, on a thread of the launcher, or of local rank 0 without one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from torsh_distributed import events
from torsh_distributed.errors import TorshError
from torsh_distributed.green.carbon.feeds import make_feed
from torsh_distributed.green.carbon.grid_watch import GridWatch, carbon_event
from torsh_distributed.green.carbon.intensity import IntensitySeries
from torsh_distributed.green.meters.counter_meter import MeterReading
from torsh_distributed.green.meters.node_meter import NodeMeter
from torsh_distributed.green.power.pacing import PaceControl

if TYPE_CHECKING:
    from torsh_distributed.green.run_control import RunControl
    from torsh_distributed.plan.sections.green import GreenConfig

_log = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], None]
"""Takes a record: an event as JSON, `{"type": "note", "text": …}` for people, `{"type": "pace", "pause_share": …}` for
workers, or `{"type": "workers", …}` for the leader."""


class JobMeter:
    """One node's energy from now on until `close`, which reads once more. Trouble is a note, never an exception."""

    def __init__(
        self,
        config: GreenConfig,
        *,
        ranks: Sequence[int],
        node: int,
        visible_gpus: str | None = None,
        send: Send,
        control: RunControl | None = None,
        root_pid: int | None = None,
    ) -> None:
        """`control` decides by what is read, on node 0 of a job that has a budget or a policy. The job's processes
        descend from `root_pid`, or from this one."""
        self._control = control
        self._node = node
        self._interval_s = config.interval_s
        self._send = send
        self._meter = NodeMeter(
            ranks, now_s=time.monotonic(), visible_gpus=visible_gpus, full_w=config.node_full_w, root_pid=root_pid
        )
        self._grid = self._open_grid(config)
        self._last_carbon: tuple[object, ...] | None = None
        self._pace = None if config.power_cap_w is None else PaceControl(config.power_cap_w)
        self._num_noted = 0
        self._told: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._note()
        self._thread = threading.Thread(target=self._run, name="torsh-energy", daemon=True)
        self._thread.start()

    def _open_grid(self, config: GreenConfig) -> GridWatch | None:
        if config.carbon == "none":
            return None
        try:
            feed = make_feed(
                config.carbon,
                zone=config.zone,
                file=config.carbon_file,
                url=config.carbon_url,
                g_per_kwh=config.g_per_kwh,
            )
        except TorshError as error:
            self._say(f"no grams are counted: {error.message} ({error.hint})")
            return None
        return GridWatch(feed, note=self._say)

    def _run(self) -> None:
        if self._grid is not None:
            self._grid.wait_for_first(self._interval_s)  # what is in memory or in a file is there at once
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
        g_per_kwh = self._intensity()
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
                g_per_kwh=g_per_kwh,
                # The formula of an estimate is told once.
                detail=None if one.detail == self._told.get(one.meter) else one.detail,
                utilization=one.state.utilization,
                celsius=one.state.celsius,
                num_others=one.state.num_others,
                own_share=one.state.own_share,
            )
            self._told[one.meter] = one.detail
            self._send(events.to_record(event))
        self._keep_pace(readings)
        self._decide()
        self._note()

    def _decide(self) -> None:
        """Ask what to do now, and write down what is known."""
        if self._control is None:
            return
        series = IntensitySeries(()) if self._grid is None else self._grid.series
        decided = self._control.decide(series, now=time.time())
        if decided is not None:
            found, event = decided
            if event is not None:
                self._send(events.to_record(event))
            told = {"workers": found.workers, "reason": found.reason, "longest_s": found.longest_s}
            self._send({"type": "workers", **told})
        self._control.keep()

    def _intensity(self) -> float | None:
        """The grid's intensity now; what it is and how old is told when it changes."""
        now = time.time()
        found = None if self._grid is None else self._grid.at(now)
        if found is None:
            return None
        key = (found, found.is_stale(now))
        if key != self._last_carbon:
            self._last_carbon = key
            self._send(events.to_record(carbon_event(found, now)))
        return found.g_per_kwh

    def _keep_pace(self, readings: Sequence[MeterReading]) -> None:
        """Tell the workers how long to pause, if the node has a cap."""
        duration_s = max((one.duration_s for one in readings), default=0.0)
        if self._pace is None or duration_s <= 0:
            return
        before = self._pace.pause_share
        share = self._pace.update(sum(one.joules for one in readings) / duration_s, duration_s)
        if abs(share - before) > 0.01 * (1 + before):
            self._send({"type": "pace", "pause_share": share})

    def _say(self, text: str) -> None:
        self._send({"type": "note", "text": text})

    def _note(self) -> None:
        new, self._num_noted = self._meter.notes[self._num_noted :], len(self._meter.notes)
        for text in new:
            self._say(text)

    def close(self) -> None:
        """Read once more and stop; closing again does nothing."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(timeout=2 * self._interval_s)
            self._read()
            if self._grid is not None:
                self._grid.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
