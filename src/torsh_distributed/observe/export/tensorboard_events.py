"""Scalars for TensorBoard, as its own records: the package writes them, and whoever looks at them has it.

Not by its `EventFileWriter`, which writes from a thread of its own and, where TensorFlow is installed, through that.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import override

from torsh_distributed.errors import missing_extra
from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.private_files import open_private


def event_file_name() -> str:
    """A name by which TensorBoard finds the file; raises FeatureNotAvailable if nothing can be written into it."""
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401 - now, not at the first step
    except ImportError as error:
        raise missing_extra("tensorboard", "writing files for TensorBoard") from error
    return f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.torsh"


def scalar_event(wall_time: float, step: int, scalars: Mapping[str, float]) -> Any:
    """An `Event` of TensorBoard with scalars of a step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    return Event(wall_time=wall_time, step=step, summary=Summary(value=values))


def write_events(file: BinaryIO, events: Iterable[Any]) -> None:
    """Append events to an open file; an empty one gets the version of the format first."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    if file.tell() == 0:
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    for event in events:
        writer.write(event.SerializeToString())


class TensorBoardEvents(Exporter):
    """Loss, rates and times of the job under `directory`, one point for each step that the view kept."""

    _GAUGES = (
        "torsh_learning_rate",
        "torsh_gradient_norm",
        "torsh_loss_scale",
        "torsh_wait_ratio",
        "torsh_input_wait_ratio",
        "torsh_host_memory_bytes",
        "torsh_device_memory_bytes",
    )

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / event_file_name()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1

    @override
    def export(self, view: JobView) -> None:
        with view.lock:
            points = [point for point in view.curve.points() if point.step > self._last_step]
            first = view.ranks[min(view.ranks)] if view.ranks else None
            extra = {} if first is None else {name: first.number(name) for name in self._GAUGES}
            custom = {} if first is None else {name: first.number(name) for name in first.custom}
        events = []
        for point in points:
            scalars = {"training/step_seconds": point.step_s}
            if point.loss is not None:
                scalars["training/loss"] = point.loss
            if point.samples_per_s is not None:
                scalars["training/samples_per_second"] = point.samples_per_s
            events.append(scalar_event(point.time, point.step, scalars))
            self._last_step = point.step
        newest = {f"rank0/{name}": value for name, value in {**extra, **custom}.items() if value is not None}
        if points and newest:
            events.append(scalar_event(points[-1].time, points[-1].step, newest))
        with os.fdopen(open_private(self._path, os.O_WRONLY | os.O_APPEND), "ab") as file:
            write_events(file, events)
