"""Record a process's events where TORSH_EVENTS_DIR and TORSH_PROGRESS_FILE say, and report what it measures.

Nothing is measured unless somebody looks: the launcher says so in TORSH_METRICS, or the plan's section `observe` does.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torsh_distributed import events, known_variables
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.events import JsonlSink
from torsh_distributed.launch.worker.launcher_line import METRICS_VARIABLE, note_error_in_flight, open_line
from torsh_distributed.launch.worker.recording.hardware_samples import HardwareSamples
from torsh_distributed.launch.worker.recording.memory_samples import MemorySamples, StepSamples
from torsh_distributed.launch.worker.recording.progress import ProgressWriter
from torsh_distributed.launch.worker.recording.step_pauses import pause_as_asked
from torsh_distributed.observe.loops.after_import import LOADER_WORKERS_VARIABLE, use_loader_workers
from torsh_distributed.observe.settings import ObserveSettings

if TYPE_CHECKING:
    from torsh_distributed.observe.serving.observer_process import ObserverProcess

_log = logging.getLogger(__name__)

LIMIT_VARIABLE = "TORSH_EVENTS_MAX_MB"
"""The most that the events of a rank take; the oldest are dropped. `torsh run --trace` sets it."""

# By process: a forked child records into its own files.
_recorders: dict[int, list[JsonlSink | StepSamples | ProgressWriter]] = {}


def record_events(directory: str | Path | None = None) -> None:
    """Start the sinks that the environment or the plan names, once per process; they close at interpreter exit.

    TORSH_EVENTS_DIR wins over `directory`, as the environment wins over a file everywhere.
    """
    if os.getpid() in _recorders:
        return
    started: list[JsonlSink | StepSamples | ProgressWriter] = []
    chosen = os.environ.get("TORSH_EVENTS_DIR") or directory
    if chosen:
        started += [JsonlSink(chosen, limit_bytes=_limit_bytes()), MemorySamples()]
        started.append(HardwareSamples(is_first_of_node=known_variables.whole_number("LOCAL_RANK") == 0))
    progress = os.environ.get("TORSH_PROGRESS_FILE")
    if progress:
        started.append(ProgressWriter(progress, on_leaving=note_error_in_flight))
    _recorders.clear()
    _recorders[os.getpid()] = started


def record_as_asked() -> None:
    """Do what TORSH_EVENTS_DIR and TORSH_METRICS ask for in a worker whose script may not know this library.

    Called when torch is imported, or at once in a worker that was forked with torch in it.
    """
    if os.environ.get("TORSH_EVENTS_DIR"):
        record_script()
    if os.environ.get("TORSH_EVENTS_DIR") or os.environ.get(METRICS_VARIABLE):
        report_metrics()


def record_script() -> None:
    """Record the events of a script that does not know this library: TORSH_EVENTS_DIR asks for them.

    Its steps come from torch's optimizers, where no reporter of metrics sees them already.
    """
    if events.current_rank() < 0 and os.environ.get("RANK", "").isdigit():
        events.set_rank(int(os.environ["RANK"]))
    record_events()
    if os.environ.get(LOADER_WORKERS_VARIABLE, "").isdigit():
        use_loader_workers(int(os.environ[LOADER_WORKERS_VARIABLE]))
    if not os.environ.get(METRICS_VARIABLE):
        from torsh_distributed.observe.loops.optimizer_steps import OptimizerSteps

        OptimizerSteps().install()


def _limit_bytes() -> int | None:
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 < limit < float("inf"):
        raise ConfigurationError(
            f"{LIMIT_VARIABLE} must be a number of megabytes above 0", hint="set it to 200", got=text
        )
    return int(limit * 2**20)


# By process: a forked child has no line, and is not the rank.
_reporting: dict[int, ObserverProcess | None] = {}


def report_metrics(wanted: ObserveSettings | None = None) -> None:
    """Begin to report, once per process, if the launcher or `wanted` asks for it. Trouble is logged, never raised."""
    if os.getpid() in _reporting:
        return
    interval = os.environ.get(METRICS_VARIABLE, "")
    is_wanted = wanted is not None and wanted.is_active
    if not interval and not is_wanted:
        return
    line = open_line()
    pause_as_asked()
    if line is None and (not is_wanted or interval):
        return  # a child of a worker: the worker itself reports
    from torsh_distributed.observe.metrics.process_metrics import start_reporting

    machine_interval_s = float(interval) if interval else wanted.machine_interval_s if wanted is not None else 5.0
    _reporting.clear()
    if events.current_rank() < 0 and os.environ.get("RANK", "").isdigit():
        events.set_rank(int(os.environ["RANK"]))
    if line is not None:
        if wanted is not None and is_wanted:
            line.send({"type": "observe", **wanted.to_dict()})
        _reporting[os.getpid()] = None
        start_reporting(line.send, machine_interval_s=machine_interval_s)
        return
    assert wanted is not None, "else nobody asked"
    observer = _own_observer(wanted)
    _reporting[os.getpid()] = observer
    if observer is not None:
        start_reporting(observer.send, machine_interval_s=machine_interval_s)


def _own_observer(wanted: ObserveSettings) -> ObserverProcess | None:
    """Without our launcher, every rank has its own metrics page, at the port plus its local rank.

    The page for people, the report and the exports are those of rank 0, and cover it alone.
    """
    from torsh_distributed.observe.serving.observer_process import ObserverProcess

    local_rank = known_variables.whole_number("LOCAL_RANK")
    if wanted.prometheus_port is not None:
        wanted = dataclasses.replace(wanted, prometheus_port=wanted.prometheus_port + local_rank)
    if known_variables.whole_number("RANK") != 0:
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
    observer.send({"type": "job", "world_size": known_variables.whole_number("WORLD_SIZE")})
    return observer


def _finish(observer: ObserverProcess) -> None:
    if os.getpid() not in _reporting:
        return  # a fork of the process that started it
    observer.send({"type": "membership", "action": "ended", "exit_code": 0})
    observer.finish(lambda kind, text: _log.log(logging.WARNING if kind == "warned" else logging.INFO, "%s", text))
