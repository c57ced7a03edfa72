"""How long a user waits before anything happens: the command line, the import, and the first line of a worker."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness import Budget, Case, Measurement, Row, Unit

_PLAN = Path(__file__).parents[2] / "examples" / "plans" / "zero3.toml"
_TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_HELLO = "print('hello', flush=True)\n"
_GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 4
dist.destroy_process_group()
"""


def _until_exit(command: list[str]) -> float:
    """Seconds from the start of the command to its end."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _until_first_line(command: list[str]) -> float:
    """Seconds from the start of the command to the first line on its stdout; it is then left to end."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        taken_s = time.perf_counter() - start
        process.stdout.read()
    if b"hello" not in line or process.returncode:
        raise RuntimeError(f"`{' '.join(command)}` did not say hello")
    return taken_s


def _in_turns(
    name: str, measure: Callable[[list[str]], float], commands: dict[str, list[str]], num_samples: int
) -> Row:
    """One row: the command under "" is ours. A first round, which fills the page cache, does not count."""
    samples: dict[str, list[float]] = {who: [] for who in commands}
    for number in range(num_samples + 1):
        for who, command in commands.items():
            taken_s = measure(command)
            if number:
                samples[who].append(taken_s)
    measured = {who: Measurement.of(values) for who, values in samples.items()}
    return Row(name=name, unit=Unit.SECONDS, ours=measured.pop(""), rivals=measured)


def _import(modules: str) -> list[str]:
    return [sys.executable, "-c", f"import {modules}"]


def _rows(budget: Budget) -> Iterator[Row]:
    num_samples = 1 if budget.is_quick else 10
    bare = [sys.executable, "-c", "pass"]
    answers = {
        "torsh --help": ([*_TORSH, "--help"], {"torchrun --help": [*_TORCHRUN, "--help"]}),
        "torsh run --help": ([*_TORSH, "run", "--help"], {"torchrun --help": [*_TORCHRUN, "--help"]}),
        "torsh plan validate": ([*_TORSH, "plan", "validate", str(_PLAN)], {"python": bare}),
        "torsh explain": ([*_TORSH, "explain", "OperationTimeout"], {"python": bare}),
        "import torch and torsh_distributed": (
            _import("torch, torch.distributed, torsh_distributed"),
            {"import torch": _import("torch, torch.distributed")},
        ),
    }
    for name, (ours, rivals) in answers.items():
        yield _in_turns(name, _until_exit, {"": ours, **rivals}, num_samples)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "hello.py"
        script.write_text(_HELLO)
        launched = {
            "": [*_TORSH, "run", str(script)],
            "python": [sys.executable, "-u", str(script)],
            "torchrun": [*_TORCHRUN, "--standalone", str(script)],
        }
        yield _in_turns("torsh run hello.py, first line", _until_first_line, launched, num_samples)
        group = Path(folder) / "group.py"
        group.write_text(_GROUP)
        ranks = ["--nproc-per-node", "4", str(group)]
        jobs = {
            "": [*_TORSH, "run", *ranks],
            "torsh run --torch-store": [*_TORSH, "run", "--torch-store", *ranks],
            "torchrun": [*_TORCHRUN, "--standalone", *ranks],
        }
        yield _in_turns("four ranks meet, reduce and end", _until_exit, jobs, max(1, num_samples // 2))


CASE = Case(
    title="Startup: the wait before anything happens",
    about="""Seconds of wall time of whole processes, in turns: commands that only answer (python alone is the least
    that any of them can take), the import of the library beyond that of torch, and the first line that a script without
    torch prints under `torsh run`, under torchrun and alone. Four ranks of a torch script, from start to end, with the
    store that asks for the job's secret, with torch's store under `torsh run`, and under torchrun.""",
    rows=_rows,
)
