"""`torsh bench`: measurements of this machine."""

from __future__ import annotations

import typer

from torsh_distributed.cli.lazy_group import lazy_group

COMMANDS = {
    "checkpoint": (
        "torsh_distributed.cli.bench.rivals.checkpoint",
        "Time saving and loading on local ranks, ours beside torch.save and torch's DCP.",
    ),
    "collectives": (
        "torsh_distributed.cli.bench.collectives",
        "Time collectives on local ranks, each backend against the last.",
    ),
    "compression": (
        "torsh_distributed.cli.bench.compression",
        "Time every method on local ranks: encoding, decoding, and a whole average.",
    ),
    "ddp": (
        "torsh_distributed.cli.bench.rivals.ddp",
        "Time a training step of replicas on local ranks, ours beside torch's DDP.",
    ),
    "fsdp": (
        "torsh_distributed.cli.bench.rivals.fsdp",
        "Time a training step of full shards on local ranks, ours beside torch's fully_shard.",
    ),
    "machine": (
        "torsh_distributed.cli.bench.machine",
        "Measure products, attention, memory, launches, the update and links, and keep them for the planner.",
    ),
    "monitor": (
        "torsh_distributed.cli.bench.rivals.monitor",
        "Time recording a value and an event, ours beside prometheus-client and logging.",
    ),
    "network": (
        "torsh_distributed.cli.bench.network",
        "Measure latency and bandwidth between local ranks, by size and over time.",
    ),
    "p2p": (
        "torsh_distributed.cli.bench.rivals.p2p",
        "Time messages between two local ranks, ours beside torch's.",
    ),
    "pipeline": (
        "torsh_distributed.cli.bench.rivals.pipeline",
        "Time a step of a pipeline on local ranks, ours beside torch's Schedule1F1B.",
    ),
    "store": (
        "torsh_distributed.cli.bench.rivals.store",
        "Time operations of a store over TCP and in memory, ours beside torch's.",
    ),
}

app = typer.Typer(name="bench", cls=lazy_group(COMMANDS), add_completion=False, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure this machine: operations and links, backends, compression, the network; and our parts beside torch's."""
