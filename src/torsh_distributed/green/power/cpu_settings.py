"""Settings of a node's processors (governor, highest clock, power limit): made for a job, and put back however it ends.

They are files of the kernel. What was found is in a record before any is changed; the launcher restores from it, and
if it is killed, its guardian runs this module with that file. They slow everything on the node: a node is the job's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torsh_distributed.green.power.found_values import write_found
from torsh_distributed.observe.metrics.energy_counters import POWERCAP

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.green import GreenConfig

Note = Callable[[str], None]

CPUFREQ = Path("/sys/devices/system/cpu/cpufreq")
_RECORDED = ("scaling_governor", "scaling_max_freq", "constraint_0_power_limit_uw")


def restoring_command(record: Path) -> list[str]:
    """What puts the settings of `record` back, in a process of its own."""
    return [sys.executable, "-m", __name__, str(record)]


def is_wanted(config: GreenConfig) -> bool:
    """Whether a plan sets anything of the processors."""
    return any(value is not None for value in (config.cpu_governor, config.cpu_max_mhz, config.cpu_limit_w))


def set_processors(
    config: GreenConfig, *, record: Path, note: Note, cpufreq: Path = CPUFREQ, powercap: Path = POWERCAP
) -> bool:
    """Set what the plan wants on all processors, all of it or nothing; whether anything was. Refusals name the key."""
    wanted: dict[Path, str] = {}
    keys: dict[str, Callable[[], dict[Path, str] | str]] = {
        "cpu_governor": lambda: _governors(cpufreq, str(config.cpu_governor)),
        "cpu_max_mhz": lambda: _clocks(cpufreq, config.cpu_max_mhz or 0.0),
        "cpu_limit_w": lambda: _limits(powercap, config.cpu_limit_w or 0.0),
    }
    told = []
    for key, plan in keys.items():
        value = getattr(config, key)
        if value is None:
            continue
        files = plan()
        if isinstance(files, str):
            note(f"green.{key} is refused: {files}")
            return False
        wanted |= files
        told.append(f"{key} {value}")
    found = {str(path): path.read_text().strip() for path in wanted}
    write_found(record, found)
    try:
        for path, text in wanted.items():
            path.write_text(text)
    except OSError as error:
        restore_settings(record, note=note)
        note(f"{', '.join(told)} of green is refused: the kernel does not let this user write it ({error.strerror})")
        return False
    note(f"processors: {', '.join(told)}; what was found is put back at the end")
    return True


def restore_settings(record: Path, *, note: Note) -> None:
    """Put back what was found, and forget it; nothing happens without a record."""
    try:
        found: Mapping[str, str] = json.loads(record.read_text())
    except (OSError, ValueError):
        return
    is_whole = True
    for name, text in found.items():
        path = Path(name)
        if path.name not in _RECORDED:
            continue
        try:
            if path.read_text().strip() != text:
                path.write_text(text)
        except OSError as error:
            is_whole = False
            note(f"{path} could not be put back to {text}: {error.strerror}")
    if is_whole:
        record.unlink(missing_ok=True)


def _governors(cpufreq: Path, wanted: str) -> dict[Path, str] | str:
    files = sorted(cpufreq.glob("policy*/scaling_governor"))
    if not files:
        return _no_clocks(cpufreq)
    for path in files:
        offered = _text(path.with_name("scaling_available_governors")).split()
        if wanted not in offered:
            return f"{path.parent.name} has no governor {wanted!r}; it has {', '.join(offered) or 'none that is told'}"
    return dict.fromkeys(files, wanted)


def _clocks(cpufreq: Path, wanted_mhz: float) -> dict[Path, str] | str:
    files = sorted(cpufreq.glob("policy*/scaling_max_freq"))
    if not files:
        return _no_clocks(cpufreq)
    for path in files:
        low, high = (_text(path.with_name(f"cpuinfo_{end}_freq")) for end in ("min", "max"))
        if not (low.isdigit() and high.isdigit() and int(low) <= wanted_mhz * 1e3 <= int(high)):
            return f"{path.parent.name} takes clocks from {_mhz(low)} to {_mhz(high)} MHz"
    return dict.fromkeys(files, str(round(wanted_mhz * 1e3)))


def _limits(powercap: Path, wanted_w: float) -> dict[Path, str] | str:
    zones = [
        path
        for path in sorted(powercap.glob("intel-rapl:*/constraint_0_power_limit_uw"))
        if _text(path.with_name("name")).startswith("package")
    ]
    if not zones:
        return f"the kernel offers no power limit of processors ({powercap}), as in most virtual machines"
    for path in zones:
        most = _text(path.with_name("constraint_0_max_power_uw"))
        if most.isdigit() and 0 < int(most) < wanted_w * 1e6:
            return f"{path.parent.name} takes at most {int(most) / 1e6:g} W"
    return dict.fromkeys(zones, str(round(wanted_w * 1e6)))


def _no_clocks(cpufreq: Path) -> str:
    return f"the kernel offers no clocks of processors ({cpufreq}), as in most virtual machines"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mhz(khz: str) -> str:
    return f"{int(khz) / 1e3:g}" if khz.isdigit() else "?"


if __name__ == "__main__":
    restore_settings(Path(sys.argv[1]), note=lambda text: print(f"torsh run: {text}", file=sys.stderr))
