"""A worker reports what it measures: to its launcher if it has one, else to an observer process of its own.

Nothing is measured unless somebody looks: the launcher says so in TORSH_METRICS, or the plan's section `observe` does.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from torsh_distributed import events
from torsh_distributed.launch.worker.launcher_line import METRICS_VARIABLE, open_line
from torsh_distributed.observe.settings import ObserveSettings

if TYPE_CHECKING:
    from torsh_distributed.observe.serving.observer_process import ObserverProcess

_log = logging.getLogger(__name__)
# By process: a forked child has no line, and is not the rank.
_started: dict[int, ObserverProcess | None] = {}


def report_metrics(wanted: ObserveSettings | None = None) -> None:
    """Begin to report, once per process, if the launcher or `wanted` asks for it. Trouble is logged, never raised."""
    if os.getpid() in _started:
        return
    interval = os.environ.get(METRICS_VARIABLE, "")
    is_wanted = wanted is not None and wanted.is_active
    if not interval and not is_wanted:
        return
    line = open_line()
    if line is None and (not is_wanted or interval):
        return  # a child of a worker: the worker itself reports
    from torsh_distributed.observe.metrics.process_metrics import start_reporting

    machine_interval_s = float(interval) if interval else wanted.machine_interval_s if wanted is not None else 5.0
    _started.clear()
    if events.current_rank() < 0 and os.environ.get("RANK", "").isdigit():
        events.set_rank(int(os.environ["RANK"]))
    if line is not None:
        if wanted is not None and is_wanted:
            line.send({"type": "observe", **wanted.to_dict()})
        _started[os.getpid()] = None
        start_reporting(line.send, machine_interval_s=machine_interval_s)
        return
    assert wanted is not None, "else nobody asked"
    observer = _own_observer(wanted)
    _started[os.getpid()] = observer
    if observer is not None:
        start_reporting(observer.send, machine_interval_s=machine_interval_s)


def _own_observer(wanted: ObserveSettings) -> ObserverProcess | None:
    """Without a launcher of ours, every rank has its own metrics page, at the port plus its local rank.

    The page for people, the report and the exports are those of rank 0, and cover it alone.
    """
    from torsh_distributed.observe.serving.observer_process import ObserverProcess

    local_rank = int(os.environ.get("LOCAL_RANK", "0") or 0)
    if wanted.prometheus_port is not None:
        wanted = dataclasses.replace(wanted, prometheus_port=wanted.prometheus_port + local_rank)
    if os.environ.get("RANK", "0") != "0":
        wanted = dataclasses.replace(wanted, page_port=None, report=None, exports=(), alert_rules=None)
    if not wanted.is_active:
        return None
    try:
        observer = ObserverProcess(wanted)
    except OSError as error:
        _log.warning("metrics are not reported: %s", error)
        return None
    # Registered before the reporter's own: it runs after the last summary was sent.
    import atexit

    atexit.register(_finish, observer)
    observer.send({"type": "job", "world_size": int(os.environ.get("WORLD_SIZE", "1") or 1)})
    return observer


def _finish(observer: ObserverProcess) -> None:
    if os.getpid() not in _started:
        return  # a fork of the process that started it
    observer.send({"type": "membership", "action": "ended", "exit_code": 0})
    observer.finish(lambda kind, text: _log.log(logging.WARNING if kind == "warned" else logging.INFO, "%s", text))
