"""`torsh bench`: measurements of this machine."""

from __future__ import annotations

import typer

from torsh_distributed.cli.lazy_group import lazy_group

COMMANDS = {
    "collectives": (
        "torsh_distributed.cli.bench.collectives",
        "Time collectives on local ranks, each backend against the last.",
    ),
    "compression": (
        "torsh_distributed.cli.bench.compression",
        "Time every method on local ranks: encoding, decoding, and a whole average.",
    ),
    "machine": (
        "torsh_distributed.cli.bench.machine",
        "Measure products, attention, memory, launches, the update and links, and keep them for the planner.",
    ),
    "network": (
        "torsh_distributed.cli.bench.network",
        "Measure latency and bandwidth between local ranks, by size and over time.",
    ),
}

app = typer.Typer(name="bench", cls=lazy_group(COMMANDS), add_completion=False, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure this machine: operations and links, backends, compression, the network."""
