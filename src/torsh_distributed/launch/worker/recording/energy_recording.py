"""The node's meters in a job without our launcher: its first rank reads them and records what they counted."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from torsh_distributed import events, upward
from torsh_distributed.events.recorded import event_of
from torsh_distributed.launch.worker.environment import Environment
from torsh_distributed.launch.worker.launcher_line import GREEN_VARIABLE

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

# By process: a forked child is not the rank.
_meters: dict[int, Any] = {}


def record_energy(config: GreenConfig, place: Environment) -> None:
    """Read the node's meters until this process ends, unless the launcher does or another rank of the node is first.

    What they count goes to the event files: with our launcher, `torsh run --green` shows it live too.
    """
    if GREEN_VARIABLE in os.environ or (place.local_rank or 0) != 0 or os.getpid() in _meters:
        return
    num_local = place.local_world_size or 1
    meter = upward.load(upward.JOB_METER)(
        config,
        ranks=[place.rank + number for number in range(num_local)],
        node=place.node_rank or 0,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        send=_record,
    )
    _meters.clear()
    _meters[os.getpid()] = meter
    atexit.register(meter.close)


def _record(record: dict[str, Any]) -> None:
    event = event_of(record)
    if event is None:
        event = events.LogEvent(level="info", message=f"energy: {record.get('text', '')}")
    events.emit(event)
