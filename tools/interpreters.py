"""Finds Python interpreters by version: on the PATH, of pyenv, or fetched by uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13")
_ASK = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"


def find_python(version: str) -> Path | None:
    """An interpreter of a version such as "3.11" that can make environments."""
    for candidate in _candidates(version):
        try:
            done = subprocess.run([candidate, "-c", _ASK], capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        if done.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[Path]:
    yield Path(sys.executable)
    for folder in os.get_exec_path():
        yield Path(folder) / f"python{version}"
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)
    if uv := shutil.which("uv"):
        subprocess.run([uv, "python", "install", "--quiet", version], timeout=600)
        found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True, timeout=60)
        yield Path(found.stdout.strip())


def make_environment(folder: Path, interpreter: Path | str, *packages: str, constraints: Path | None = None) -> Path:
    """An empty environment with these packages; returns its Python."""
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    if packages:
        pins = ["-c", str(constraints)] if constraints else []
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, *pins, *packages], check=True)
    return python
