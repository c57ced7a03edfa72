"""Builds and loads the compiled modules; `hatch_build.py` builds them at install, running this file builds them again.

Imports only the standard library: at install there is nothing else. Each module is one file for Python 3.11 and later
(the stable ABI) and needs no torch headers, so it works with any torch. Every module has a portable replacement, used
where it is not built.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any, NamedTuple

_log = logging.getLogger("torsh_distributed.native")  # run by path too

PACKAGE = Path(__file__).parent
_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE=",
    "-Werror=implicit-function-declaration",
    "-O3",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
)


class CompiledModule(NamedTuple):
    """A compiled extension module and the folder of its C sources."""

    name: str
    sources: Path
    target: Path
    without_it: str
    """What happens without it, as a sentence printed at install."""


SHM_CORE = CompiledModule(
    name="the shm backend's compiled core",
    sources=PACKAGE / "comm/backends/shm/native",
    target=PACKAGE / "comm/backends/shm/_core.abi3.so",
    without_it="the portable core is used: correct, but several times slower",
)
CODEC_KERNELS = CompiledModule(
    name="the gradient codecs' compiled kernels",
    sources=PACKAGE / "compress/native",
    target=PACKAGE / "compress/_kernels.abi3.so",
    without_it="torch's operators are used: the same bytes, several times slower",
)
ADAM_KERNEL = CompiledModule(
    name="the compiled kernel of Adam on host memory",
    sources=PACKAGE / "parallel/native",
    target=PACKAGE / "parallel/_adam.abi3.so",
    without_it="torch's fused kernel is used: the same results, slower on some processors",
)
WINDOW_ATOMICS = CompiledModule(
    name="the compiled atomics of one-sided windows",
    sources=PACKAGE / "rpc/windows/native",
    target=PACKAGE / "rpc/windows/_atomics.abi3.so",
    without_it="one-sided windows are refused",
)
PORT_LIMIT = CompiledModule(
    name="the library that keeps listening ports in a range",
    sources=PACKAGE / "launch/native",
    target=PACKAGE / "launch/_ports.so",
    without_it="--port-range is refused",
)
"""Not for Python: processes are started with it in LD_PRELOAD."""
COMPILED_MODULES = (SHM_CORE, CODEC_KERNELS, ADAM_KERNEL, WINDOW_ATOMICS, PORT_LIMIT)


def fingerprint(sources: Path) -> int:
    """A checksum of the C sources; a module built from other sources has another one."""
    code = 0
    for path in sorted((*sources.glob("*.c"), *sources.glob("*.h"))):
        code = zlib.crc32(path.read_bytes(), code)
    return code & 0x7FFFFFFF | 1  # never 0, which means "not built"


def is_stale(compiled: CompiledModule, version: int) -> bool:
    """Whether a module of that version was built from sources other than those beside it; wheels have no sources."""
    return compiled.sources.exists() and fingerprint(compiled.sources) != version


@functools.cache
def load(compiled: CompiledModule) -> Any | None:
    """The compiled module; None if it was not built, or was built from other sources, which is said.

    Any: it has no Python source; its docstrings describe the arguments.
    """
    folder = compiled.target.relative_to(PACKAGE).parent
    name = ".".join((PACKAGE.name, *folder.parts, compiled.target.name.partition(".")[0]))
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if is_stale(compiled, module.VERSION):
        _log.warning(
            "%s was built from other sources than those here (%s); run `python -m torsh_distributed.native`",
            compiled.target.name,
            compiled.without_it,
        )
        return None
    return module


def build(sources: Path, target: Path) -> str:
    """Compile one module; returns why that failed, or an empty string."""
    if sys.platform != "linux":
        return f"it supports Linux only, this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    if not shutil.which(compiler[0]):
        return "no C compiler was found"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return f"Python's headers are not in {include}"
    # Written to another name and renamed: a process that has mapped the old file keeps it.
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
    """Build every module; returns what went wrong, or an empty string."""
    problems = {compiled.name: build(compiled.sources, compiled.target) for compiled in COMPILED_MODULES}
    return "\n".join(f"{name}: {problem}" for name, problem in problems.items() if problem)


if __name__ == "__main__":
    sys.exit(main() or 0)
