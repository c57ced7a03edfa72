from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from torsh_distributed.observe.metrics import gpu_sensors
from torsh_distributed.observe.metrics.gpu_sensors import GpuSensors
from torsh_distributed.observe.metrics.machine_sensors import MachineSensors, ProcessSensors
from torsh_distributed.observe.metrics.rank_metrics import RankMetrics


@pytest.mark.needs_cuda
@pytest.mark.needs_library("pynvml")
def test_the_driver_tells_what_it_measures() -> None:
    readings = GpuSensors().read()
    assert readings
    assert readings[0].total_bytes is not None
    assert readings[0].total_bytes > 2**30
    assert 0 <= (readings[0].utilization or 0) <= 1
    assert readings[0].celsius is None or 5 < readings[0].celsius < 120
    assert readings[0].limit_celsius is None or 60 < readings[0].limit_celsius < 130
    assert readings[0].uncorrected_errors in (None, 0), "a GPU with broken memory"


def test_a_driver_without_the_package_says_what_to_install_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpu_sensors, "_DRIVER", tmp_path / "version")
    assert GpuSensors().read() == [], "no driver, no GPU"
    (tmp_path / "version").touch()
    sensors = MachineSensors(interval_s=0.0)
    for _ in range(3):
        sensors.read(RankMetrics())
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert 'pip install "torsh-distributed[gpu]"' in said


def test_the_machine_is_read_and_what_is_absent_is_absent() -> None:
    metrics, sensors = RankMetrics(), MachineSensors(interval_s=0.0)
    sensors.read(metrics)
    sensors.read(metrics)
    values = metrics.values()
    total = values["torsh_node_memory_total_bytes"]
    assert total is not None
    assert 0 < (values["torsh_node_memory_used_bytes"] or 0) < total
    assert 0 <= (values["torsh_node_cpu_ratio"] or 0) <= 1
    assert 0 <= (values["torsh_node_io_wait_ratio"] or 0) <= 1
    assert values["torsh_node_memory_ratio"] == pytest.approx((values["torsh_node_memory_used_bytes"] or 0) / total)
    assert (values["torsh_node_network_receive_bytes"] or 0) >= 0
    assert None not in [value for name, value in values.items() if name.startswith("torsh_gpu")]


def test_what_the_allocator_holds_and_cannot_use_is_its_fragmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"allocated_bytes.all.current": 60, "allocated_bytes.all.peak": 70, "reserved_bytes.all.current": 100}
    found = held | {"inactive_split_bytes.all.current": 25}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: found)
    metrics = RankMetrics()
    ProcessSensors().read(metrics)
    values = metrics.values()
    assert values["torsh_device_memory_fragmentation_ratio"] == 0.25
    names = ("bytes", "peak_bytes", "reserved_bytes")
    assert [values[f"torsh_device_memory_{name}"] for name in names] == [60, 70, 100]


@pytest.mark.needs_cuda
def test_a_gap_between_blocks_in_use_is_fragmentation() -> None:
    torch.cuda.empty_cache()
    blocks = [torch.empty(2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del blocks[::2]
    metrics = RankMetrics()
    ProcessSensors().read(metrics)
    values = metrics.values()
    assert 0 < (values["torsh_device_memory_fragmentation_ratio"] or 0) < 1
    assert values["torsh_device_memory_bytes"] == torch.cuda.memory_allocated()
    assert values["torsh_device_memory_reserved_bytes"] == torch.cuda.memory_reserved()


def test_the_energy_of_processors_is_added_up_across_the_meters_end(tmp_path: Path) -> None:
    for name, package in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(f"{package}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("100000000\n")
    metrics, sensors = RankMetrics(), MachineSensors(interval_s=0.0, powercap=tmp_path)
    for total_j in (90, 95, 5):
        for name in ("intel-rapl:0", "intel-rapl:0:0"):
            (tmp_path / name / "energy_uj").write_text(f"{total_j * 10**6}\n")
        sensors.read(metrics)
    rows = [row for row in metrics.summary() if row[0] == "torsh_node_energy_joules"]
    assert rows == [["torsh_node_energy_joules", ["package-0"], 15.0]]


def test_a_sensor_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sensors = MachineSensors(interval_s=0.0)
    calls = []

    def fail(metrics: RankMetrics) -> None:
        calls.append(1)
        raise OSError("no such file")

    sensors._readers = [fail]
    for _ in range(3):
        sensors.read(RankMetrics())
    assert len(calls) == 1
