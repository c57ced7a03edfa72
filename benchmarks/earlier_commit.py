"""Cases measured in an earlier commit's tree and in this one, on the same machine in turns.

Kept results are of one machine, and this one is seldom it. An earlier commit can be measured on any.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.result import Result, load_result

_LIMIT_S = 600
_C_SOURCES = ("*.c", "*.h")


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The commit's files in a temporary folder; the compiled parts of this checkout, if their sources are the same."""
    with tempfile.TemporaryDirectory(prefix="torsh-bench-") as folder:
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        tree = Path(folder)
        if subprocess.run(["git", "diff", "--quiet", commit, "--", *_C_SOURCES], cwd=ROOT, check=False).returncode:
            _run(tree, "torsh_distributed.native")
        else:
            for built in (ROOT / "src").rglob("*.so"):
                shutil.copy(built, tree / built.relative_to(ROOT))
        yield tree


def pairs_of(tree: Path, cases: Sequence[str]) -> list[tuple[Result, Result]]:
    """A quick run of every case that both trees have, now and earlier, each tree in a fresh process."""
    both = [name for name in cases if (tree / "benchmarks" / "cases" / f"{name}.py").exists()]
    now, earlier = _measured(ROOT, both), _measured(tree, both)
    return list(zip(now, earlier, strict=True))


def _measured(tree: Path, cases: Sequence[str]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="torsh-bench-") as folder:
        _run(tree, "benchmarks", *cases, "--quick", "--json", folder)
        return [load_result(Path(folder) / f"{name}.json") for name in cases]


def _run(tree: Path, module: str, *args: str) -> None:
    """Run a module of that tree, whose sources win over the installed ones."""
    path = os.pathsep.join([str(tree / "src"), str(tree)])
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(args)} failed in {tree}:\n{done.stderr}")
