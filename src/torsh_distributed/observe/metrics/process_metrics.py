"""The metrics of this process, and the thread that reports them. One set per process: a fork begins its own."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from torsh_distributed.observe.metrics.operation_rates import AxisOf
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.rank_metrics import Metric, RankMetrics, Send
from torsh_distributed.observe.metrics.rank_reporter import INTERVAL_S, RankReporter

_lock = threading.Lock()
_sets: dict[int, RankMetrics] = {}
_reporters: dict[int, RankReporter] = {}


def process_metrics() -> RankMetrics:
    """The metrics of this process."""
    pid = os.getpid()
    if pid not in _sets:
        with _lock:
            if pid not in _sets:
                _sets.clear()
                _sets[pid] = RankMetrics()
    return _sets[pid]


def metric(name: str, *, kind: str = "gauge", unit: str = "", help: str = "") -> Metric:
    """A metric of yours: `metric("eval_accuracy").record(0.93)`. Kinds: gauge, counter, distribution.

    It is reported with the others, exported as `torsh_custom_<name>`, and may be used in rules of alerts. Record from
    any thread; where nothing reports, values are kept in a ring.
    """
    return process_metrics().custom(name, kind=kind, unit=unit, help=help)


def start_reporting(send: Send, *, interval_s: float = INTERVAL_S, machine_interval_s: float = 5.0) -> RankReporter:
    """Collect this process's metrics and pass a summary to `send` every `interval_s`, until the process ends.

    The first rank of a node reads the node's sensors too, every `machine_interval_s`.
    """
    pid = os.getpid()
    with _lock:
        running = _reporters.get(pid)
    if running is not None:
        return running
    collector = RankCollector(process_metrics())
    reporter = RankReporter(collector, send, interval_s=interval_s, machine_interval_s=machine_interval_s)
    reporter.install_hooks()
    with _lock:
        _reporters.clear()
        _reporters[pid] = reporter
    atexit.register(stop_reporting)
    return reporter


def stop_reporting() -> None:
    """Send the last summary and stop; nothing happens if nothing was started in this process."""
    with _lock:
        reporter = _reporters.pop(os.getpid(), None)
    if reporter is not None:
        reporter.close()


def note_fact(name: str, value: Any) -> None:
    """Tell whoever looks at this job something about this rank, if anything is reported; `value` is JSON-ready."""
    reporter = _reporters.get(os.getpid())
    if reporter is not None:
        reporter.facts[name] = value


def note_axes(axis_of: AxisOf) -> None:
    """Tell which groups lie along which axis of the mesh, if anything is reported; asked on the reporter's thread."""
    reporter = _reporters.get(os.getpid())
    if reporter is not None:
        reporter.note_axes(axis_of)
