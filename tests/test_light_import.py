"""Importing the package is light: no optional package comes with it, nothing is started, nothing is set."""

from __future__ import annotations

import json
import subprocess
import sys

OPTIONAL = {"redis", "mpi4py", "matplotlib", "ray", "dask", "opentelemetry", "deepspeed", "zstandard", "psutil"}
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


def test_importing_brings_no_optional_package_and_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=100, check=True)
    report = json.loads(done.stdout)
    assert not OPTIONAL & set(report["modules"])
    assert report["threads"] == 0
    assert report["tasks"] == 0
    assert report["environment"]
    assert not report["initialized"]
