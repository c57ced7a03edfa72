"""What a test may need from the machine: one function per `needs_…` marker, each with a real probe.

A function returns None if the need is met, else the reason of the skip. With TORSH_REQUIRE_ALL=1 every skip is a
failure, except for hardware that no script can install: a machine set up for the whole suite must not pass by skipping.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.bed import real_deepspeed
from tests.lab.network import Lab, LabError
from torsh_distributed.native import SHM_CORE, load

REQUIRE_ALL = "TORSH_REQUIRE_ALL"
_PROBE_TIMEOUT_S = 20.0


def _first_failure(*commands: list[str]) -> str | None:
    """The error of the first command that fails."""
    for command in commands:
        if shutil.which(command[0]) is None:
            return f"no {command[0]} on the PATH"
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
        if done.returncode:
            return f"`{' '.join(command)}` says: {(done.stderr or done.stdout).strip() or done.returncode}"
    return None


@functools.cache
def redis() -> str | None:
    """A redis-server that runs, and the client of the [redis] extra."""
    if importlib.util.find_spec("redis") is None:
        return 'no redis client; pip install "torsh-distributed[redis]"'
    return _first_failure(["redis-server", "--version"])


@functools.cache
def netns() -> str | None:
    """Root, iproute2, and a kernel that can make a lab with one rate-limited host."""
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
def cuda(num_devices: int = 1) -> str | None:
    """As many CUDA devices as the marker asks for: `needs_cuda` or `needs_cuda(2)`."""
    import torch

    found = torch.cuda.device_count()
    return None if found >= num_devices else f"torch sees {found} CUDA devices, {num_devices} needed"


@functools.cache
def browser() -> str | None:
    """Chromium, under one of its package names."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name) is not None:
            return _first_failure([name, "--version"])
    return "no chromium on the PATH"


def mpiexec() -> str:
    """The launcher that the MPI wheel installed beside this interpreter, or the one on the PATH."""
    return shutil.which("mpiexec", path=Path(sys.executable).parent) or "mpiexec"


_LOAD_MPICH = """
import mpi4py.rc as rc
rc.initialize = False
from mpi4py import MPI
vendor, _ = MPI.get_vendor()
assert vendor == "MPICH", f"the MPI library is {vendor}, not MPICH"
"""


@functools.cache
def mpi() -> str | None:
    """mpi4py with an MPICH that it can load, and a launcher for its processes; the tests use MPICH's PMI."""
    if importlib.util.find_spec("mpi4py") is None:
        return 'no mpi4py; pip install "torsh-distributed[mpi]"'
    return _first_failure(
        [sys.executable, "-c", _LOAD_MPICH],
        [mpiexec(), "--version"],
    )


@functools.cache
def command(name: str) -> str | None:
    """A program on the PATH: `needs_command("promtool")`."""
    return None if shutil.which(name) is not None else f"no {name} on the PATH"


@functools.cache
def library(name: str) -> str | None:
    """A Python package that ours works with but does not need: `needs_library("transformers")`."""
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of "a.b", where there is no a
        is_there = False
    return None if is_there else f"no {name}; pip install {name}"


@functools.cache
def torchvision() -> str | None:
    """torchvision that loads: its wheels on PyPI are linked with CUDA and need a torch built with it."""
    reason = _first_failure([sys.executable, "-c", "import torchvision"])
    return None if reason is None else "torchvision cannot be imported; its wheels on PyPI need a torch built with CUDA"


@functools.cache
def dp_accounting() -> str | None:
    """The accountant of the [federated] extra, which wants an older attrs than other packages of the tests."""
    return (
        None
        if library("dp_accounting") is None
        else "no dp-accounting; pip install --no-deps -r constraints/accounting.txt"
    )


@functools.cache
def core() -> str | None:
    """The compiled core of the shm backend; installing finds no C compiler on some machines, and goes on."""
    if load(SHM_CORE) is not None:
        return None
    return "the compiled core is not built from these sources; python -m torsh_distributed.native"


FAIRSCALE = Path(__file__).parents[2] / "build" / "fairscale"
"""Where the real FairScale is, apart from the environment: benchmarks/fairscale.txt says how it gets there."""


@functools.cache
def fairscale() -> str | None:
    """The real FairScale beside the environment, for tests that compare with it."""
    is_there = (FAIRSCALE / "fairscale" / "__init__.py").exists()
    return None if is_there else "no build/fairscale; the first lines of benchmarks/fairscale.txt say how to get it"


@functools.cache
def deepspeed() -> str | None:
    """DeepSpeed, installed aside to compare with."""
    if (real_deepspeed.PLACE / "deepspeed").is_dir():
        return None
    return f"no build/deepspeed; {real_deepspeed.INSTALL}"


@functools.cache
def _may_lack_fairscale() -> bool:
    """Whether no script could have installed it either."""
    return not real_deepspeed.can_be_installed("fairscale")


@functools.cache
def _may_lack_deepspeed() -> bool:
    """Whether no script could have installed it either."""
    return not real_deepspeed.can_be_installed()


NEEDS: dict[str, Callable[..., str | None]] = {
    "needs_redis": redis,
    "needs_netns": netns,
    "needs_cuda": cuda,
    "needs_browser": browser,
    "needs_mpi": mpi,
    "needs_library": library,
    "needs_command": command,
    "needs_core": core,
    "needs_dp_accounting": dp_accounting,
    "needs_torchvision": torchvision,
    "needs_fairscale": fairscale,
    "needs_deepspeed": deepspeed,
}
_HARDWARE = frozenset({"needs_cuda", "needs_torchvision"})
_STARTS_RANKS = frozenset({"world", "mpi_world", "lab"})
_SLOW_TO_IMPORT = frozenset({"transformers", "lightning", "torchao"})


def unmet_needs(item: pytest.Item) -> dict[str, str]:
    """The reasons to skip, by the name of each marker that this machine does not satisfy."""
    unmet = {}
    for name, probe in NEEDS.items():
        for marker in item.iter_markers(name):
            reason = probe(*marker.args)
            if reason is not None:
                unmet[name] = reason
    return unmet


def _may_be_absent(unmet: dict[str, str]) -> bool:
    """Whether a test may be skipped for these needs even where everything is required."""
    return (
        bool(_HARDWARE & unmet.keys())
        or ("needs_deepspeed" in unmet and _may_lack_deepspeed())
        or ("needs_fairscale" in unmet and _may_lack_fairscale())
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the markers implied by a test's fixtures and parameters, so no test has to state them."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "lab" in fixtures:
            item.add_marker(pytest.mark.needs_netns)
        if getattr(item, "callspec", None) is not None and item.callspec.params.get("core") == "native":
            item.add_marker(pytest.mark.needs_core)
        compares = any(item.get_closest_marker(name) for name in ("needs_deepspeed", "needs_fairscale"))
        if fixtures & _STARTS_RANKS or compares:  # the other library runs in an interpreter of its own
            item.add_marker(pytest.mark.ranks)
        if any(marker.args[0].split(".")[0] in _SLOW_TO_IMPORT for marker in item.iter_markers("needs_library")):
            item.add_marker(pytest.mark.slow)  # the first one in a process imports it


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip with all reasons at once."""
    unmet = unmet_needs(item)
    if unmet:
        pytest.skip("; ".join(f"{name}: {reason}" for name, reason in unmet.items()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """If everything is required, a skip is a failure; an expected failure (xfail) stays one."""
    report = yield
    if (
        report.skipped
        and os.environ.get(REQUIRE_ALL) == "1"
        and call.excinfo is not None
        and isinstance(call.excinfo.value, pytest.skip.Exception)
        and not _may_be_absent(unmet_needs(item))
    ):
        report.outcome = "failed"
        report.longrepr = f"{REQUIRE_ALL}=1 allows no skip, but: {call.excinfo.value.msg}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    if report.skipped and os.environ.get(REQUIRE_ALL) == "1":
        report.outcome = "failed"
        report.longrepr = f"{REQUIRE_ALL}=1 allows no skip, but: {report.longreprtext}"
    return report
