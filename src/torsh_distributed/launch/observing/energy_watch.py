"""The launcher's meters: a thread reads them, the launcher's loop passes on what they counted.

One launcher runs on each node, before the first worker and after the last: the energy of a node is counted once,
whatever happens to its workers.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torsh_distributed import upward
from torsh_distributed.events import AlertEvent, EnergyEvent, emit, to_record
from torsh_distributed.events.recorded import event_of
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.guardian import Guardian
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.observing.node_gpus import VISIBLE
from torsh_distributed.launch.spec import JobSpec
from torsh_distributed.observe.metrics.step_record import unpack_steps

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_MAX_RECORD_BYTES = 1 << 14
_MAX_STEPS = 64
_THEN = {
    "warn": "",
    "slow": "; workers pause between steps as long as they compute",
    "stop": "; the job saves and ends",
}


class EnergyWatch:
    """Reads the meters of this node until `close`, and emits what they count; `take` gets it as records, on the loop's
    thread."""

    def __init__(
        self,
        config: GreenConfig,
        spec: JobSpec,
        loop: Loop,
        output: LauncherOutput,
        *,
        take: Callable[[dict[str, Any]], None],
        pace: Callable[[float], None],
        stop: Callable[[], None],
        want: Callable[[int, str, float], None],
        guardian: Guardian,
        directory: Path,
    ) -> None:
        """`pace` tells this node's workers how long to pause, as a multiple of a step; `stop` saves and ends;
        `want` says on node 0 how many workers train, why, and how long none may."""
        self._loop = loop
        self._output = output
        self._take = take
        self._pace = pace
        self._stop = stop
        self._want = want
        self._is_leader = spec.is_leader
        self._epoch: int | None = None
        self._num_workers = spec.world_size
        self._total_steps: int | None = None
        control = upward.load(upward.RUN_CONTROL)
        elastic = spec.elastic
        can_scale = elastic is not None and elastic.discovery is None
        self._control = None
        if spec.is_leader and control.is_wanted(config):
            self._control = control(
                config,
                min_workers=elastic.min_workers if elastic is not None and can_scale else spec.world_size,
                max_workers=spec.world_size,
                now=time.time(),
                record=spec.energy_record,
                note=self._note,
            )
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        visible = {**os.environ, **spec.env}.get(VISIBLE)
        self._meter = upward.load(upward.JOB_METER)(
            config,
            ranks=[place.rank for place in spec.places()],
            node=spec.node_rank,
            visible_gpus=visible,
            send=self._send,
            control=self._control,
        )
        self._is_spent = False
        self._pauses: dict[Literal["cap", "budget"], float] = {"cap": 0.0, "budget": 0.0}
        """What asks for pauses, as multiples of a step: the longest one counts."""
        self._limits = directory / "gpu-limits.json"
        if config.gpu_limit_w is not None:
            # Said to the guardian first: it restores if this process is killed at any later moment.
            guardian.run_after(upward.load(upward.GPU_LIMIT).restoring_command(self._limits))
            upward.load(upward.GPU_LIMIT).limit_gpus(
                config.gpu_limit_w, visible=visible, record=self._limits, note=self._note
            )
        self._settings = directory / "cpu-settings.json"
        processors = upward.load(upward.CPU_SETTINGS)
        if processors.is_wanted(config):
            guardian.run_after(processors.restoring_command(self._settings))
            processors.set_processors(config, record=self._settings, note=self._note)
        loop.watch(self._ours.fileno(), self._hear)

    def _send(self, record: dict[str, Any]) -> None:
        """On the meter's thread."""
        data = json.dumps(record).encode()
        if len(data) > _MAX_RECORD_BYTES:  # a part of a record could not be read
            return
        try:
            self._theirs.send(data, socket.MSG_DONTWAIT)
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
                self._note(record["text"])
            elif record["type"] == "pace":
                self.pause("cap", record["pause_share"])
            elif record["type"] == "workers":
                self._want(record["workers"], record["reason"], record["longest_s"])
            else:
                self._pass_on(record if record["type"] != "energy" else {**record, "epoch": self._epoch})

    def _pass_on(self, record: dict[str, Any]) -> None:
        """A meter of this node has counted, or what follows from it: for who records it here, and for `take`."""
        event = event_of(record)
        if event is not None:
            emit(event)
            self._take(record)

    def heed(self, rank: int, message: dict[str, Any]) -> None:
        """A rank reports, or a meter, whose rank is -1."""
        if rank >= 0:
            self._take_report(message)
        else:
            self._count(message)

    def _count(self, record: dict[str, Any]) -> None:
        """On node 0: what a meter of any node has counted, against the budget."""
        event = event_of(record) if self._control is not None else None
        if self._control is None or not isinstance(event, EnergyEvent):
            return
        actions, news = self._control.take_energy(event)
        for one in news:
            self._pass_on(to_record(one))
        for action, told in actions:
            if self._is_spent:
                return
            self._output.warn(f"energy: {told}{_THEN[action]}")
            alert = AlertEvent(rank=-1, severity=action, name="energy budget", message=f"{told}{_THEN[action]}")
            self._pass_on(to_record(alert))
            self._is_spent = action == "stop"
            if action == "stop":
                self._stop()
        self.pause("budget", float(self._control.is_slowing))

    def pause(self, what: Literal["cap", "budget"], share: float) -> None:
        """Something asks for pauses, or for none any more; workers hear of the longest."""
        before = max(self._pauses.values())
        self._pauses[what] = share
        if max(self._pauses.values()) != before:
            self._pace(max(self._pauses.values()))

    def _take_report(self, message: dict[str, Any]) -> None:
        """A rank of this node, on node 0 of any, reports its steps, and may tell its epoch."""
        if message.get("type") != "metrics":
            return
        facts = message.get("facts")
        if isinstance(facts, dict):
            self._take_epoch(facts.get("epoch"), message.get("rank"))
        if self._control is None:
            return
        if isinstance(facts, dict):
            total, world = facts.get("total_steps"), facts.get("world_size")
            self._total_steps = total if isinstance(total, int) else self._total_steps
            self._num_workers = world if isinstance(world, int) else self._num_workers
        if message.get("rank") == 0:
            steps, _ = unpack_steps(message.get("steps"), most=_MAX_STEPS)
            self._control.take_steps(
                steps=[(one.step, one.step_s) for one in steps if not one.is_skipped],
                total_steps=self._total_steps,
                workers=self._num_workers,
            )

    def _take_epoch(self, epoch: object, rank: object) -> None:
        """On node 0 that of rank 0 alone: other ranks tell an epoch a moment later, and a budget would begin thrice."""
        if not isinstance(epoch, int) or (self._is_leader and rank != 0):
            return
        self._epoch = epoch
        if self._control is not None:
            self._control.begin_epoch(epoch)
            self.pause("budget", float(self._control.is_slowing))

    def _note(self, text: str) -> None:
        self._output.say(f"energy: {text}")

    def close(self, *, is_done: bool = False) -> None:
        """Read once more, pass that on, stop, and put back what was changed. `is_done` for a job that succeeded."""
        self._meter.close()
        self._hear()
        if self._control is not None:
            self._control.close(is_done=is_done)
        if self._limits.exists():
            upward.load(upward.GPU_LIMIT).restore_limits(self._limits, note=self._note)
        if self._settings.exists():
            upward.load(upward.CPU_SETTINGS).restore_settings(self._settings, note=self._note)
        self._loop.unwatch(self._ours.fileno())
        self._ours.close()
        self._theirs.close()
