"""Builds the compiled parts: at install, through `hatch_build.py`, and by running this file.

Imports nothing outside the standard library, for at install there is nothing else. Each part is one file for every
Python from 3.11 on (the stable ABI) and needs no header of torch, so it fits any torch. What was not built is done
without: every part has a portable twin.
"""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parent
_FLAGS = (
    "-std=c11",
    "-O3",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
)


class Part(NamedTuple):
    """A compiled extension module, and the folder of C that it is made of."""

    name: str
    sources: Path
    target: Path
    without_it: str
    """What its absence costs, as a sentence for the one who installs."""


SHM_CORE = Part(
    name="the shm backend's compiled core",
    sources=PACKAGE / "comm/backends/shm/native",
    target=PACKAGE / "comm/backends/shm/_core.abi3.so",
    without_it="the portable core will be used; it is correct, but several times slower",
)
CODEC_KERNELS = Part(
    name="the gradient codecs' compiled kernels",
    sources=PACKAGE / "compress/native",
    target=PACKAGE / "compress/_kernels.abi3.so",
    without_it="torch's operators will be used; they give the same bytes, several times slower",
)
ADAM_KERNEL = Part(
    name="the compiled kernel of Adam on host memory",
    sources=PACKAGE / "parallel/native",
    target=PACKAGE / "parallel/_adam.abi3.so",
    without_it="torch's fused kernel will be used; it gives the same results, more slowly on some processors",
)
PARTS = (SHM_CORE, CODEC_KERNELS, ADAM_KERNEL)


def fingerprint(sources: Path) -> int:
    """A number that changes with every source file: a module built from others must not be taken for this one's."""
    code = 0
    for path in sorted((*sources.glob("*.c"), *sources.glob("*.h"))):
        code = zlib.crc32(path.read_bytes(), code)
    return code & 0x7FFFFFFF | 1  # never 0, which stands for "not built"


def is_stale(part: Part, version: int) -> bool:
    """Whether a module of that version was built from other sources than those beside it; wheels carry none."""
    return part.sources.exists() and fingerprint(part.sources) != version


@functools.cache
def load(part: Part) -> Any | None:
    """The compiled module, or None where there is none, or one of other sources than those beside it.

    Any: it has no Python source; its docstrings give the arguments.
    """
    folder = part.target.relative_to(PACKAGE).parent
    name = ".".join((PACKAGE.name, *folder.parts, part.target.name.partition(".")[0]))
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return None if is_stale(part, module.VERSION) else module


def build(sources: Path, target: Path) -> str:
    """Compile one part; returns why it could not be, or an empty string."""
    if sys.platform != "linux":
        return f"it is written for Linux, this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    if not shutil.which(compiler[0]):
        return "no C compiler was found"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return f"Python's headers are not in {include}"
    # Written beside and renamed: a process that has the old one mapped keeps it.
    fresh = target.with_suffix(f".{os.getpid()}.tmp")
    files = sorted(str(path) for path in sources.glob("*.c"))
    version = f"-DTSH_VERSION={fingerprint(sources)}"
    command = [*compiler, *_FLAGS, version, f"-I{include}", *files, "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fresh.unlink(missing_ok=True)
        return f"the compiler failed:\n{done.stderr.strip()}"
    fresh.replace(target)
    return ""


def main() -> str:
    """Build every part; returns what went wrong, or an empty string."""
    problems = {part.name: build(part.sources, part.target) for part in PARTS}
    return "\n".join(f"{name}: {problem}" for name, problem in problems.items() if problem)


if __name__ == "__main__":
    sys.exit(main() or 0)
