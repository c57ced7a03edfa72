"""`torsh env`: this process's place in a job, its variables, and the backends of this machine."""

from __future__ import annotations

import os
import platform
import sys

import torch
import typer
from rich.console import Console
from rich.table import Table

from torsh_distributed import __version__
from torsh_distributed.comm.backends.capabilities import BackendType, probe_capabilities
from torsh_distributed.launch.worker.environment import read_environment

VARIABLES = {
    "TORSH_INIT_TIMEOUT": "seconds the ranks have to meet (300)",
    "TORSH_LOG": "level of the library's messages, in launcher and workers: DEBUG, INFO, WARNING, ERROR, CRITICAL",
    "TORSH_EVENTS_DIR": "directory for each process's events as JSON lines",
    "TORSH_EVENTS_MAX_MB": "most megabytes of events per process; the oldest are dropped",
    "TORSH_DEBUG": "1 compares every collective between the ranks before it runs, to find a bug",
    "TORSH_PLAN": "plan file, read by Plan.from_env(os.environ)",
    "TORSH_JOB_TOKEN": "the job's secret, the same on every node; a file (`--token-file`) is safer",
    "TORSH_SECRET_FILE": "file with the job's secret; `torsh run` sets it for its workers",
    "TORSH_STORE": "address of the store that `torsh run` serves to its workers",
    "TORSH_STORE_TOKEN": "secret that clients of `torsh store serve` must know",
    "TORSH_RANK": "overrides the launcher's rank",
    "TORSH_WORLD_SIZE": "overrides the launcher's world size",
    "TORSH_LOCAL_RANK": "overrides the launcher's local rank",
    "TORSH_NODE_ID": "overrides the launcher's node rank",
    "TORSH_MASTER_ADDR": "overrides MASTER_ADDR",
    "TORSH_MASTER_PORT": "overrides MASTER_PORT",
    "MASTER_ADDR": "address of the node of rank 0 (127.0.0.1)",
    "MASTER_PORT": "port of the store (29500)",
    "GLOO_SOCKET_IFNAME": "network interface for gloo (loopback on one node, else the one that reaches the master)",
    "NCCL_SOCKET_IFNAME": "network interface for nccl (between nodes, the one that reaches the master)",
    "CUDA_VISIBLE_DEVICES": "GPUs this process may use",
    "OMP_NUM_THREADS": "threads of each process",
}
_SECRETS = {"TORSH_JOB_TOKEN", "TORSH_STORE_TOKEN"}

app = typer.Typer(add_completion=False)


@app.command()
def show() -> None:
    """Show this process's place in a job, its variables and its backends."""
    console = Console(highlight=False)
    console.print(
        f"torsh-distributed {__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {torch.cuda.device_count()} GPUs"
    )
    console.print(f"place in the job: {read_environment()}\n")
    table = Table("variable", "value", "meaning", title="environment")
    for name, meaning in VARIABLES.items():
        value = os.environ.get(name)
        shown = "-" if value is None else "(set, hidden)" if name in _SECRETS else value
        table.add_row(name, shown, meaning)
    console.print(table)
    backends = Table("backend", "usable", "devices", "all-reduce takes", title="backends, as found by trying")
    for backend in BackendType:
        found = probe_capabilities(backend)
        ops = sorted({op.value for op, _ in found.reductions})
        backends.add_row(
            backend.value,
            "yes" if found.is_available else f"no: {found.reason}",
            ", ".join(found.devices) or "-",
            ", ".join(ops) or "-",
        )
    console.print(backends)
