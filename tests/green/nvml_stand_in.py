"""Builds the stand-in for NVIDIA's driver library: a real shared object, which nvidia-ml-py loads by its name."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("nvml_stand_in.c")


class StandIn:
    """The library and the directory of its numbers."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        pytest.importorskip("pynvml")
        (folder / "lib").mkdir(parents=True)
        library = folder / "lib" / "libnvidia-ml.so.1"
        named = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run([compiler, *named, "-O1", "-o", str(library), str(_SOURCE)], check=True, timeout=60)
        self.numbers = folder / "numbers"
        self.numbers.mkdir()
        self.variables = {"LD_LIBRARY_PATH": str(folder / "lib"), "NVML_STAND_IN": str(self.numbers)}

    def write(self, name: str, number: int) -> None:
        partial = self.numbers / f"{name}.new"
        partial.write_text(f"{number}\n")
        partial.replace(self.numbers / name)

    def write_processes(self, index: int, uses: Mapping[int, int]) -> None:
        """Percent of the computing time by process."""
        partial = self.numbers / "processes.new"
        partial.write_text("".join(f"{pid} {use}\n" for pid, use in uses.items()))
        partial.replace(self.numbers / f"processes-{index}")

    def read(self, name: str) -> int:
        return int((self.numbers / name).read_text())
