"""What a test may need of the machine: one function per `needs_…` marker, each probing for real.

A function returns None if the need is met, else the reason of the skip. With TORSH_REQUIRE_ALL=1 an unmet
need fails the test instead: a machine prepared for the whole suite must not pass by skipping.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.lab.network import Lab, LabError

REQUIRE_ALL = "TORSH_REQUIRE_ALL"
_PROBE_TIMEOUT_S = 20.0


def _first_failure(*commands: list[str]) -> str | None:
    """The complaint of the first command that does not succeed."""
    for command in commands:
        if shutil.which(command[0]) is None:
            return f"no {command[0]} on the PATH"
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
        if done.returncode:
            return f"`{' '.join(command)}` says: {(done.stderr or done.stdout).strip() or done.returncode}"
    return None


@functools.cache
def redis() -> str | None:
    """A redis-server binary that runs, and the client of the [redis] extra."""
    if importlib.util.find_spec("redis") is None:
        return 'no redis client; pip install "torsh-distributed[redis]"'
    return _first_failure(["redis-server", "--version"])


@functools.cache
def netns() -> str | None:
    """Root, iproute2, and a kernel in which a lab with one rate-limited host can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"no {command} on the PATH; install iproute2"
    try:
        with Lab() as lab:
            lab.host(0).limit(0.001)
    except LabError as error:
        return str(error)
    return None


@functools.cache
def cuda() -> str | None:
    """At least one CUDA device that torch can use."""
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


@functools.cache
def browser() -> str | None:
    """Chromium, under one of the names it is packaged as."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name) is not None:
            return _first_failure([name, "--version"])
    return "no chromium on the PATH"


@functools.cache
def mpi() -> str | None:
    """mpi4py with an MPI library that it can load, and a launcher for its processes."""
    if importlib.util.find_spec("mpi4py") is None:
        return 'no mpi4py; pip install "torsh-distributed[mpi]"'
    return _first_failure(
        [sys.executable, "-c", "import mpi4py.rc as rc; rc.initialize = False; from mpi4py import MPI"],
        ["mpiexec", "--version"],
    )


NEEDS: dict[str, Callable[[], str | None]] = {
    "needs_redis": redis,
    "needs_netns": netns,
    "needs_cuda": cuda,
    "needs_browser": browser,
    "needs_mpi": mpi,
}
# A graphics card cannot be installed by a script; all else can, so its absence is a mistake in the set-up.
_CANNOT_BE_INSTALLED = frozenset({"needs_cuda"})


def check_needs(item: pytest.Item) -> None:
    """Skip the test with its reason, or fail it where everything is required."""
    for name, probe in NEEDS.items():
        if item.get_closest_marker(name) is None:
            continue
        reason = probe()
        if reason is None:
            continue
        if os.environ.get(REQUIRE_ALL) == "1" and name not in _CANNOT_BE_INSTALLED:
            pytest.fail(f"{name} is not met, and {REQUIRE_ALL}=1 allows no skip: {reason}", pytrace=False)
        pytest.skip(f"{name}: {reason}")
