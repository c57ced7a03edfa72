"""The C sources under sanitizers: no address out of bounds, nothing undefined, no race between ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.native import COMPILED_MODULES, PACKAGE, SHM_CORE, build

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("threads_as_ranks.py")
TESTS = [
    "tests/comm/backends/shm",
    "tests/comm/shared_memory",
    "tests/compress/kernels",
    "tests/parallel/optim/test_cpu_adam.py",
    "tests/parallel/optim/test_divided_update.py",
]

pytestmark = [pytest.mark.matrix, pytest.mark.needs_command("gcc"), pytest.mark.timeout(900)]


def library(name: str) -> str:
    """The sanitizer's runtime, which must be in a process before Python."""
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def build_with(flags: str, sources: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("CC", f"gcc -g -fno-omit-frame-pointer {flags}")
        assert build(sources, target) == ""


def run_threads(sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    core = folder / "_core.abi3.so"
    build_with("-fsanitize=thread", sources, core, monkeypatch)
    env = {**os.environ, "LD_PRELOAD": library("libtsan.so")}
    command = [sys.executable, str(RANKS), str(core)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_ranks_do_not_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_threads(SHM_CORE.sources, tmp_path, monkeypatch)
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:4000]
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all results are right" in done.stdout


def test_a_race_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ranks, without the orders of memory that publish what they wrote."""
    sources = tmp_path / "native"
    shutil.copytree(SHM_CORE.sources, sources)
    for path in sources.iterdir():
        text = path.read_text()
        for order in ("acquire", "release", "seq_cst"):
            text = text.replace(f"memory_order_{order}", "memory_order_relaxed")
        path.write_text(text)
    done = run_threads(sources, tmp_path, monkeypatch)
    assert "data race" in done.stderr
    assert done.returncode != 0


def test_no_address_is_out_of_bounds_and_nothing_is_undefined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / "src" / PACKAGE.name
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for compiled in COMPILED_MODULES:
        target = copied / compiled.target.relative_to(PACKAGE)
        build_with("-fsanitize=address,undefined -fno-sanitize-recover=all", compiled.sources, target, monkeypatch)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copied.parent), str(ROOT)]),
        "LD_PRELOAD": f"{library('libasan.so')}:{library('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it allocates
    }
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "the kernels were not built" not in done.stdout
    assert "the kernel is not compiled" not in done.stdout
