from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.green.nvml_stand_in import StandIn
from torsh_distributed.green.meters.counter_meter import CounterMeter
from torsh_distributed.green.meters.load_estimate import CORE_W, LoadEstimate, full_power
from torsh_distributed.green.meters.node_meter import NodeMeter


class Counter:
    """A counter whose numbers the test gives."""

    name, source, max_w = "gpu 0", "nvml", 700.0

    def __init__(self, *totals: float, range_j: float | None = None) -> None:
        self._totals = list(totals)
        self.range_j = range_j

    def read_j(self) -> float:
        return self._totals.pop(0)


def packages(root: Path, **joules: int) -> Path:
    for number, (name, total_j) in enumerate(joules.items()):
        zone = root / f"intel-rapl:{number}"
        zone.mkdir(exist_ok=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text("1000000000\n")
        (zone / "energy_uj").write_text(f"{total_j * 10**6}\n")
    return root


def test_a_counter_that_starts_over_loses_nothing_and_one_that_goes_back_counts_nothing() -> None:
    wrapping = CounterMeter(Counter(900, 990, 30, range_j=1000), (0,), now_s=0.0)
    assert [wrapping.read(now_s).joules for now_s in (1.0, 2.0)] == [90, 40]
    reloaded = CounterMeter(Counter(5000, 5100, 10, 60), (0,), now_s=0.0)
    found = [reloaded.read(now_s) for now_s in (1.0, 2.0, 3.0)]
    assert [one.joules for one in found] == [100, 0, 50]
    assert "went back" in (found[1].detail or "")
    assert found[0].detail is None


def test_a_growth_that_the_device_cannot_draw_is_refused_with_its_number() -> None:
    meter = CounterMeter(Counter(0, 10**15, 10**15 + 300), (0,), now_s=0.0)
    absurd, fine = meter.read(1.0), meter.read(2.0)
    assert (absurd.joules, fine.joules) == (0.0, 300)
    assert "1e+15 J" in (absurd.detail or "")


def test_processors_are_counted_by_package_and_the_platform_not_once_more(tmp_path: Path) -> None:
    packages(tmp_path, **{"package-0": 10, "package-1": 20, "psys": 100})
    meter = NodeMeter([0, 1], now_s=0.0, powercap=tmp_path, hwmon=tmp_path / "none")
    packages(tmp_path, **{"package-0": 15, "package-1": 27, "psys": 150})
    readings = meter.read(2.0)
    assert [(one.meter, one.joules, one.ranks) for one in readings] == [
        ("package-0", 5.0, (0, 1)),
        ("package-1", 7.0, (0, 1)),
    ]
    assert meter.is_measured
    assert meter.notes == []


def test_a_meter_of_the_whole_node_replaces_all_others(tmp_path: Path) -> None:
    packages(tmp_path, **{"package-0": 10})
    chip = tmp_path / "hwmon0"
    chip.mkdir()
    (chip / "name").write_text("power_meter\n")
    (chip / "power1_average").write_text("250000000\n")
    meter = NodeMeter([0], now_s=0.0, powercap=tmp_path, hwmon=tmp_path)
    (found,) = meter.read(1.0)
    assert (found.source, found.is_measured) == ("hwmon", True)


@pytest.fixture
def as_user() -> Iterator[None]:
    """No root in the test: root may read everything."""
    before = os.geteuid()
    os.seteuid(65534 if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


def test_without_permission_the_estimate_says_what_is_missing(as_user: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        packages(Path(folder), **{"package-0": 10})
        (Path(folder) / "intel-rapl:0" / "energy_uj").chmod(0)
        meter = NodeMeter([0], now_s=0.0, powercap=Path(folder), hwmon=Path(folder) / "none")
    assert "needs root" in meter.notes[0]


def test_a_counter_that_does_not_answer_is_named_and_the_estimate_takes_its_place(tmp_path: Path) -> None:
    packages(tmp_path, **{"package-0": 10})
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("no number\n")
    meter = NodeMeter([0], now_s=0.0, powercap=tmp_path, hwmon=tmp_path / "none", full_w=100.0)
    assert "package-0 cannot be read (rapl)" in meter.notes[0]
    (found,) = meter.read(1.0)
    assert (found.source, found.is_measured) == ("estimate", False)
    assert not meter.is_measured


def test_an_estimate_is_its_formula_applied_to_the_load(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 0 0 100 0 0 0 0 0 0\n")
    estimate = LoadEstimate((0,), now_s=0.0, full_w=200.0, proc=tmp_path)
    (tmp_path / "stat").write_text("cpu  150 0 0 150 0 0 0 0 0 0\n")
    found = estimate.read(10.0)
    assert found.joules == pytest.approx(200 * (0.1 + 0.9 * 0.5) * 10)
    assert "200 W (given in the plan)" in (found.detail or "")
    assert "not measured" in (found.detail or "")


@pytest.mark.needs_library("codecarbon")
def test_a_processor_of_the_table_has_its_design_power_and_another_an_assumption(tmp_path: Path) -> None:
    known = "model name\t: Intel(R) Xeon(R) Gold 6154 CPU @ 3.00GHz\nphysical id\t: 0\n"
    (tmp_path / "cpuinfo").write_text(known + "model name\t: same\nphysical id\t: 1\n")
    watts, how = full_power(tmp_path)
    assert watts == 400.0
    assert "2 × Intel Xeon Gold 6154, 200 W" in how
    (tmp_path / "cpuinfo").write_text("model name\t: Nonesuch 9000\n")
    watts, how = full_power(tmp_path)
    assert watts == CORE_W * (os.cpu_count() or 1)
    assert "assumed" in how


_SHARED = """
from torsh_distributed.green.meters.node_meter import NodeMeter

meter = NodeMeter([0], now_s=0.0)
print(meter.notes[0])
print([one.detail for one in meter.read(1.0) if one.meter == "gpu 0"], [one.detail for one in meter.read(2.0)][0])
hidden = NodeMeter([0], now_s=0.0, visible_gpus="", full_w=1.0)
print([one.meter for one in hidden.read(1.0)])
"""


def test_a_gpu_that_another_job_uses_is_said_to_be_shared_in_its_first_reading(tmp_path: Path) -> None:
    gpu = StandIn(tmp_path / "nvml")
    gpu.write("energy-0", 1000)
    gpu.write("busy-0", 2)
    command = [sys.executable, "-c", _SHARED]
    variables = {**os.environ, **gpu.variables}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "gpu 0 is in use by 2 other processes, whose energy is in this number too",
        "['in use by 2 other processes, whose energy is in this number too'] None",
        "['processors']",  # a job from which all GPUs are hidden is not charged for them
    ], done.stderr
