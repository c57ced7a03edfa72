from __future__ import annotations

from pathlib import Path

from torsh_distributed import events
from torsh_distributed.launch.worker.recording.hardware_samples import HardwareSamples


def sample(*, is_first_of_node: bool = True, hwmon: Path, edac: Path) -> list[events.Event]:
    seen: list[events.Event] = []
    samples = HardwareSamples(is_first_of_node=is_first_of_node, interval_s=1000, hwmon=hwmon, edac=edac)
    end = events.subscribe(seen.append, events.HardwareEvent)
    try:
        for step in range(3):
            events.emit(events.StepEvent(step=step, duration_s=0.1))
    finally:
        end()
        samples.close()
    return seen


def write(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_the_hottest_sensor_and_all_memory_errors_are_told_by_the_nodes_first_rank(tmp_path: Path) -> None:
    hwmon, edac = tmp_path / "hwmon", tmp_path / "edac"
    write(hwmon / "hwmon0", temp1_input=41000, temp1_crit=100000, temp2_input=70000, temp2_max=80000)
    write(hwmon / "hwmon1", temp1_input=99000, temp2_input="", temp2_crit=100000)  # no limit; does not answer
    write(edac / "mc0", ce_count=3, ue_count=0)
    write(edac / "mc1", ce_count=4, ue_count=1)
    (event,) = sample(hwmon=hwmon, edac=edac)
    assert isinstance(event, events.HardwareEvent)
    assert (event.device, event.celsius, event.limit_celsius) == ("host", 70.0, 80.0)
    assert (event.corrected_errors, event.uncorrected_errors) == (7, 1)
    assert sample(is_first_of_node=False, hwmon=hwmon, edac=edac) == []


def test_what_is_not_measured_is_not_told(tmp_path: Path) -> None:
    assert sample(hwmon=tmp_path / "none", edac=tmp_path / "none") == []
