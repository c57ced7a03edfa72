"""The node's meters in a job without our launcher: its first rank reads them and records what they counted."""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING, Any

from torsh_distributed import events, upward
from torsh_distributed.events.recorded import event_of
from torsh_distributed.launch.worker.environment import Environment
from torsh_distributed.launch.worker.launcher_line import GREEN_VARIABLE

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

_log = logging.getLogger(__name__)

_OF_THE_LAUNCHER = (
    "max_kwh",
    "max_epoch_kwh",
    "max_co2_kg",
    "max_epoch_co2_kg",
    "power_cap_w",
    "gpu_limit_w",
    "strategy",
    "cpu_governor",
    "cpu_max_mhz",
    "cpu_limit_w",
)
"""Keys that somebody beside the ranks has to carry out."""

# By process: a forked child is not the rank.
_meters: dict[int, Any] = {}


def record_energy(config: GreenConfig, place: Environment) -> None:
    """Read the node's meters until this process ends, unless the launcher does or another rank of the node is first.

    What they count goes to the event files: with our launcher, `torsh run --green` shows it live too.
    """
    if GREEN_VARIABLE in os.environ or (place.local_rank or 0) != 0 or os.getpid() in _meters:
        return
    unused = [f"green.{key}" for key in _OF_THE_LAUNCHER if getattr(config, key) not in (None, "none")]
    if unused:
        _log.warning("%s: no effect here, only `torsh run` does that; the energy is measured", ", ".join(unused))
    num_local = place.local_world_size or 1
    meter = upward.load(upward.JOB_METER)(
        config,
        ranks=[place.rank + number for number in range(num_local)],
        node=place.node_rank or 0,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        send=_record,
        # The other ranks of the node descend from what started this one.
        root_pid=os.getppid() if num_local > 1 else os.getpid(),
    )
    _meters.clear()
    _meters[os.getpid()] = meter
    atexit.register(meter.close)


def _record(record: dict[str, Any]) -> None:
    event = event_of(record)
    if record["type"] == "note":
        # What is not measured, and why: with our launcher people read it in the terminal, so here too.
        _log.warning("energy: %s", record["text"])
        event = events.LogEvent(level="warning", message=f"energy: {record['text']}")
    if event is not None:
        events.emit(event)
