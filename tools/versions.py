"""Runs the quick tests with another Python and another torch, in an environment of their own under build/versions.

`make versions PY=3.11 TORCH=2.11`. With `--turn HASH` a commit's hash chooses the pair, so that each has its turn.
Every other package is as `constraints/dev.txt` says. Arguments that are not known here are pytest's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from interpreters import find_python, make_environment

ROOT = Path(__file__).parents[1]
PAIRS = (("3.11", "2.11"), ("3.13", "2.13"))
"""Python and torch: the oldest and the newest of both."""
QUICK = "not ranks and not slow and not matrix"


def main() -> None:
    """Set up the environment of one pair, if it is not there yet, and run pytest in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=PAIRS[0][0], help="a version, such as 3.11")
    parser.add_argument("--torch", default=PAIRS[0][1], help="a version, such as 2.11")
    parser.add_argument("--turn", metavar="HASH", help="choose both by the hash of a commit")
    options, pytest_args = parser.parse_known_args()
    python, torch = pair_of(options.turn) if options.turn else (options.python, options.torch)
    print(f"Python {python} with torch {torch}", flush=True)
    interpreter = find_python(python)
    if interpreter is None:
        sys.exit(f"no Python {python} was found on the PATH or among pyenv's; install it, or put uv on the PATH")
    installed = set_up(ROOT / "build" / "versions" / f"python{python}-torch{torch}", interpreter, torch)
    if not any(arg.startswith("-m") for arg in pytest_args):
        pytest_args = ["-m", QUICK, *pytest_args]
    command = [str(installed), "-m", "pytest", "-n", "2", "--dist", "worksteal", *pytest_args]
    sys.exit(subprocess.run(command, cwd=ROOT).returncode)


def pair_of(commit: str) -> tuple[str, str]:
    """The pair whose turn it is at a commit, of those whose Python is here."""
    here = [pair for pair in PAIRS if find_python(pair[0])] or list(PAIRS)
    return here[int(commit[:8], 16) % len(here)]


def set_up(environment: Path, interpreter: Path, torch: str) -> Path:
    """Install this checkout with that torch, unless it is there and made from the same; returns its Python."""
    # What a torch brings along is as old as it.
    of_torch = re.compile(r"(torch=|triton|setuptools|nvidia-|cuda-)")
    pins = [line for line in (ROOT / "constraints/dev.txt").read_text().splitlines() if not of_torch.match(line)]
    made_from = "\n".join([*pins, f"torch=={torch}.*", (ROOT / "pyproject.toml").read_text()])
    note = environment / "made_from.txt"
    if note.exists() and note.read_text() == made_from:
        return environment / "bin" / "python"
    constraints = environment.with_suffix(".txt")
    constraints.parent.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join(pins) + "\n")
    packages = (f"torch=={torch}.*", "-e", f"{ROOT}[dev]")
    python = make_environment(environment, interpreter, *packages, constraints=constraints)
    note.write_text(made_from)
    return python


if __name__ == "__main__":
    main()
