"""Builds the compiled core: at install, through `hatch_build.py`, and by running this file.

Imports nothing outside the standard library, for at install there is nothing else. The core is one file for every
Python from 3.11 on (the stable ABI) and needs no header of torch, so it fits any torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "native"
TARGET = FOLDER / "_core.abi3.so"
_FLAGS = ("-std=c11", "-O3", "-fwrapv", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


def fingerprint(sources: Path = SOURCES) -> int:
    """A number that changes with every source file: a core built from others must not be taken for this one's."""
    code = 0
    for path in sorted((*sources.glob("*.c"), *sources.glob("*.h"))):
        code = zlib.crc32(path.read_bytes(), code)
    return code & 0x7FFFFFFF | 1  # never 0, which stands for "no core"


def build(sources: Path = SOURCES, target: Path = TARGET) -> str:
    """Compile the core; returns why it could not be, or an empty string."""
    if sys.platform != "linux":
        return f"it needs Linux's futexes, this is {sys.platform}"
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


if __name__ == "__main__":
    sys.exit(build() or 0)
