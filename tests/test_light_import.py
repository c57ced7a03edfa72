"""Importing the package is light: no optional package comes with it, nothing is started, nothing is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

OPTIONAL = {"redis", "mpi4py", "matplotlib", "ray", "dask", "opentelemetry", "deepspeed", "zstandard", "psutil"} | {
    *("tensorboard", "pynvml", "hjson", "kubernetes", "safetensors"),
}
REPORT = """
import json, os, sys, threading
environment = dict(os.environ)
import torch, torch.distributed
before, threads, tasks = set(sys.modules), threading.active_count(), len(os.listdir("/proc/self/task"))
import torsh_distributed
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "threads": threading.active_count() - threads,
    "tasks": len(os.listdir("/proc/self/task")) - tasks,
    "environment": dict(os.environ) == environment,
    "initialized": torch.distributed.is_initialized(),
}))
"""
TORCHS = """
import json, sys, torch, torch.distributed, torch.distributed.fsdp, torch.distributed.tensor
def names():
    found = {}
    for module in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        for name, value in vars(sys.modules[module]).items():
            found[f"{module}.{name}"] = id(value)
            if isinstance(value, (type, dict)):
                inside = dict(value if isinstance(value, dict) else vars(value))
                found |= {f"{module}.{name}.{key}": id(one) for key, one in inside.items() if isinstance(key, str)}
    return found
before = names()
import torsh_distributed
after = names()
print(json.dumps({
    "changed": sorted(name for name in before if after.get(name) != before[name]),
    "added": sorted(name for name in after if name not in before),
}))
torch.distributed.init_process_group("gloo")  # through the wrapped functions, which leave it to torch's
torch.distributed.monitored_barrier()
torch.distributed.destroy_process_group()
"""
WRAPPED = {
    "torch.distributed.distributed_c10d.monitored_barrier",
    "torch.distributed.monitored_barrier",
    "torch.distributed.rendezvous._create_c10d_store",
    "torch.distributed.rendezvous._rendezvous_handlers.env",
}

PLAN = str(Path(__file__).parents[1] / "examples" / "plans" / "zero3.toml")
LOADED = """
import atexit, sys
atexit.register(lambda: print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr))
from torsh_distributed.cli.app import main
main()
"""


def test_importing_brings_no_optional_package_and_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=100, check=True)
    report = json.loads(done.stdout)
    assert not OPTIONAL & set(report["modules"])
    assert report["threads"] == 0
    assert report["tasks"] == 0
    assert report["environment"]
    assert not report["initialized"]


def test_importing_wraps_three_functions_of_torch_and_adds_our_backends() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TORCHS], capture_output=True, text=True, timeout=100, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["changed"]) == WRAPPED
    assert {name.rpartition(".")[2].lower() for name in report["added"]} == {"shm", "torsh", "mpi4py"}


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["bench", "--help"],
        ["demo", "--help"],
        ["plan", "validate", PLAN, "--world", "4"],
        ["plan", "show", PLAN],
        ["explain", "OperationTimeout"],
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_the_command_line_answers_without_torch(args: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "torsh_distributed" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib"}


def test_metrics_are_ready_before_torch_is_imported() -> None:
    """Reporting begins in the hook after torch is imported: a module of it that imports torch would enter it again."""
    code = "import sys, torsh_distributed.observe.metrics.process_metrics; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 0


def test_training_imports_no_pipelines_no_compiler_no_offload_and_no_tables() -> None:
    """The first two cost a second, in every rank of every job, the others a tenth."""
    code = (
        "import sys, torsh_distributed as td; td.parallelize;"
        " unused = {'torch._dynamo', 'torch.distributed.pipelining', 'rich', 'torsh_distributed.parallel.offload'};"
        " sys.exit(' '.join(unused & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "\n"


def test_help_needs_no_pydantic() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, "run", "--help"], capture_output=True, text=True, timeout=60)
    assert "pydantic" not in done.stderr.splitlines()[-1].split()


def test_a_job_is_launched_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("print('hello')\n")
    command = [sys.executable, "-c", LOADED, "run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hello") == 2
    assert not {"torch", "numpy", "tarfile"} & set(done.stderr.splitlines()[-1].split())
