"""Scalars for TensorBoard, in its own file format, written here: no package is needed to write them.

The format: records of length (8 bytes), masked CRC-32C of the length, an `Event` in protobuf, masked CRC-32C of it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.private_files import open_private

_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    value = crc32c(data)
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def scalar_event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """An `Event` with a summary of scalars: wall_time = 1, step = 2, summary = 5; a value has tag = 1, number = 2."""
    values = b"".join(
        _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in scalars.items()
    )
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + _bytes_field(5, values)


def record_bytes(event: bytes) -> bytes:
    """An event as a record of the file."""
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event))


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
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.torsh"
        self._path = folder / name
        self._last_step = -1
        self._write(b"\x09" + struct.pack("<d", time.time()) + _bytes_field(3, b"brain.Event:2"))

    @override
    def export(self, view: JobView) -> None:
        with view.lock:
            points = [point for point in view.curve.points() if point.step > self._last_step]
            first = view.ranks[min(view.ranks)] if view.ranks else None
            extra = {} if first is None else {name: first.number(name) for name in self._GAUGES}
            custom = {} if first is None else {name: first.number(name) for name in first.custom}
        for point in points:
            scalars = {"training/step_seconds": point.step_s}
            if point.loss is not None:
                scalars["training/loss"] = point.loss
            if point.samples_per_s is not None:
                scalars["training/samples_per_second"] = point.samples_per_s
            self._write(scalar_event(point.time, point.step, scalars))
            self._last_step = point.step
        newest = {f"rank0/{name}": value for name, value in {**extra, **custom}.items() if value is not None}
        if points and newest:
            self._write(scalar_event(points[-1].time, points[-1].step, newest))

    def _write(self, event: bytes) -> None:
        data = record_bytes(event)
        fd = open_private(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
