"""Clocks and limits of processors, in a tree as the kernel has it: all or nothing, refused by name, put back."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from torsh_distributed.green.power.cpu_settings import is_wanted, restore_settings, restoring_command, set_processors
from torsh_distributed.plan import GreenConfig


class Kernel:
    """Two clock domains and one package."""

    def __init__(self, folder: Path) -> None:
        self.cpufreq, self.powercap, self.record = folder / "cpufreq", folder / "powercap", folder / "found.json"
        for number in (0, 1):
            self.write(self.cpufreq / f"policy{number}", scaling_governor="performance", scaling_max_freq="3500000")
            self.write(
                self.cpufreq / f"policy{number}",
                scaling_available_governors="performance powersave",
                cpuinfo_min_freq="800000",
                cpuinfo_max_freq="3500000",
            )
        zone = self.powercap / "intel-rapl:0"
        self.write(
            zone, name="package-0", constraint_0_power_limit_uw="150000000", constraint_0_max_power_uw="165000000"
        )
        self.notes: list[str] = []

    @staticmethod
    def write(folder: Path, **files: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")

    def set(self, **green: object) -> bool:
        config = GreenConfig(enabled=True, **green)
        assert is_wanted(config)
        return set_processors(
            config, record=self.record, note=self.notes.append, cpufreq=self.cpufreq, powercap=self.powercap
        )

    def state(self) -> tuple[str, ...]:
        files = [
            *sorted(self.cpufreq.glob("policy*/scaling_governor")),
            *sorted(self.cpufreq.glob("policy*/scaling_max_freq")),
            self.powercap / "intel-rapl:0" / "constraint_0_power_limit_uw",
        ]
        return tuple(path.read_text().strip() for path in files)


FOUND = ("performance", "performance", "3500000", "3500000", "150000000")


def test_all_settings_are_made_on_all_processors_and_put_back_by_a_process_of_its_own(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    assert kernel.set(cpu_governor="powersave", cpu_max_mhz=2000.0, cpu_limit_w=90.0), kernel.notes
    assert kernel.state() == ("powersave", "powersave", "2000000", "2000000", "90000000")
    assert "what was found is put back" in kernel.notes[-1]
    subprocess.run(restoring_command(kernel.record), check=True, timeout=60)
    assert kernel.state() == FOUND
    assert not kernel.record.exists()
    restore_settings(kernel.record, note=kernel.notes.append)  # twice does no harm


@pytest.mark.parametrize(
    ("green", "match"),
    [
        ({"cpu_governor": "ondemand"}, "green.cpu_governor is refused: policy0 has no governor 'ondemand'"),
        ({"cpu_max_mhz": 5000.0}, "green.cpu_max_mhz is refused: policy0 takes clocks from 800 to 3500 MHz"),
        ({"cpu_governor": "powersave", "cpu_limit_w": 400.0}, "green.cpu_limit_w is refused: .* at most 165 W"),
    ],
)
def test_what_the_machine_does_not_take_is_refused_by_name_with_nothing_changed(
    tmp_path: Path, green: dict[str, object], match: str
) -> None:
    kernel = Kernel(tmp_path)
    assert not kernel.set(**green)
    assert re.search(match, kernel.notes[-1]), kernel.notes
    assert kernel.state() == FOUND
    assert not kernel.record.exists()


def test_a_machine_without_clocks_and_a_user_without_rights_are_told(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.cpufreq = tmp_path / "none"
    assert not kernel.set(cpu_governor="powersave")
    assert "as in most virtual machines" in kernel.notes[-1]
    kernel = Kernel(tmp_path / "other")
    second = kernel.cpufreq / "policy1" / "scaling_max_freq"
    second.unlink()
    second.symlink_to("/proc/version")  # the kernel lets nobody write it, root neither
    if not os.access("/proc/version", os.R_OK):
        pytest.skip("there is no file that nobody may write")
    assert not kernel.set(cpu_max_mhz=2000.0)
    assert "does not let this user write it" in kernel.notes[-1]
    assert (kernel.cpufreq / "policy0" / "scaling_max_freq").read_text().strip() == "3500000"
