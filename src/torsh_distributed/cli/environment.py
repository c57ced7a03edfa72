"""`torsh env`: this process's place in a job, its variables, and the backends of this machine."""

from __future__ import annotations

import os
import platform
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from torsh_distributed import __version__
from torsh_distributed.comm.backends.capabilities import BackendType, probe_capabilities
from torsh_distributed.known_variables import SECTIONS, Variable, render_page
from torsh_distributed.launch.worker.environment import read_environment

app = typer.Typer(add_completion=False)
_ANSWERS = {True: "yes", False: "no", None: "-"}


@app.command()
def show(
    reference: Annotated[bool, typer.Option("--reference", hidden=True, help="Print the reference page.")] = False,
) -> None:
    """Show this process's place in a job, its variables and its backends."""
    if reference:
        print(render_page(), end="")
        return
    console = Console(highlight=False)
    console.print(
        f"torsh-distributed {__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {torch.cuda.device_count()} GPUs"
    )
    console.print(f"place in the job: {read_environment()}\n")
    for title, section in SECTIONS.items():
        table = Table("variable", "value", "from", "meaning", title=title)
        for one in section:
            table.add_row(one.name, *_value(one), one.meaning)
        console.print(table)
    columns = ("backend", "usable", "devices", "asynchronous", "messages", "all-reduce takes")
    backends = Table(*columns, title="backends, as found by trying")
    for backend in BackendType:
        found = probe_capabilities(backend)
        ops = sorted({op.value for op, _ in found.reductions})
        backends.add_row(
            backend.value,
            "yes" if found.is_available else f"no: {found.reason}",
            ", ".join(found.devices) or "-",
            _ANSWERS[found.is_asynchronous],
            _ANSWERS[found.has_messages],
            ", ".join(ops) or "-",
        )
    console.print(backends)


def _value(one: Variable) -> tuple[str, str]:
    """What the variable is now, and where that comes from."""
    value = os.environ.get(one.name)
    if value is None:
        return (one.default, "default") if one.default else ("-", "not set")
    return "(hidden)" if one.kind == "secret" else value, "environment"
