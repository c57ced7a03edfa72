"""The `torsh` command: thin Typer commands over the library; the one place that prints and exits."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from torsh_distributed.cli.error_message import errors_in_words
from torsh_distributed.cli.lazy_group import lazy_group
from torsh_distributed.log_level import set_log_level

COMMANDS = {
    "run": ("torsh_distributed.cli.run.command", "Start a script on every worker, supervise it, and say why it ended."),
    "demo": ("torsh_distributed.cli.demo.command", "Train a demo on local workers: progress, a summary, a loss curve."),
    "submit": (
        "torsh_distributed.cli.cluster.submit_command",
        "Hand a script to a cluster's engine, which runs it as `torsh run` would.",
    ),
    "jobs": ("torsh_distributed.cli.cluster.jobs_command", "List the jobs that you submitted, and where they stand."),
    "logs": ("torsh_distributed.cli.cluster.logs_command", "Show the output of all ranks of a submitted job."),
    "cancel": (
        "torsh_distributed.cli.cluster.cancel_command",
        "End a submitted job; returns when nothing of it runs.",
    ),
    "render": (
        "torsh_distributed.cli.cluster.render_command",
        "Write what a cluster, a container or a cloud needs to run a script, and run nothing.",
    ),
    "scale": ("torsh_distributed.cli.scale", "Give a running elastic job more or fewer workers."),
    "plan": ("torsh_distributed.cli.plan.commands", "Show, check and document plans."),
    "explain": ("torsh_distributed.cli.explain", "Say what an error means, whether a retry may help, and what to do."),
    "env": ("torsh_distributed.cli.environment", "Show this process's place in a job, its variables and its backends."),
    "dashboard": (
        "torsh_distributed.cli.observe.dashboard",
        "Show a job's event files as a live page, or as a report.",
    ),
    "top": ("torsh_distributed.cli.observe.top", "Show a job at the terminal: its event files, or a page's address."),
    "compare": ("torsh_distributed.cli.observe.compare", "Compare two runs by their event files."),
    "forecast": (
        "torsh_distributed.cli.observe.forecast",
        "Say how a run converges, how calmly and how efficiently, what is a risk, and when its loss reaches a target.",
    ),
    "metrics": ("torsh_distributed.cli.observe.metrics", "Say what is measured; make a Grafana dashboard."),
    "green": ("torsh_distributed.cli.green.commands", "Say what runs cost in energy and CO2, and when to run."),
    "doctor": (
        "torsh_distributed.cli.doctor.doctor_command",
        "Check this machine before a run, or say what a running job is stuck in.",
    ),
    "collect": (
        "torsh_distributed.cli.doctor.collect_command",
        "Bundle versions, checks, variables, logs and plans for a bug report, with secrets masked.",
    ),
    "trace": ("torsh_distributed.cli.trace.trace_commands", "Make timelines of recorded runs, and sum them up."),
    "why": (
        "torsh_distributed.cli.trace.why_command",
        "Say why a recorded run is slow, with the evidence, and what to change, with the gain that follows from it.",
    ),
    "tune": (
        "torsh_distributed.cli.trace.tune_command",
        "Run a recorded job as it was and in other ways, in turns, and say what was gained.",
    ),
    "bench": (
        "torsh_distributed.cli.bench.app",
        "Measure this machine: operations and links, backends, compression, the network; and our parts beside torch's.",
    ),
    "checkpoint": (
        "torsh_distributed.cli.checkpoint.commands",
        "Look at checkpoints, verify, compare, remove and exchange them.",
    ),
    "chaos": (
        "torsh_distributed.cli.chaos",
        "Run a script while faults happen to its ranks, and say how soon it went on after each.",
    ),
    "incidents": (
        "torsh_distributed.cli.incidents",
        "Show the incidents of a run: failures, actions, times to failure and to recovery; and ranks at risk.",
    ),
    "migrate": (
        "torsh_distributed.cli.migrate",
        "Make plans of other libraries' configs, read their checkpoints, and look at scripts of theirs.",
    ),
    "federated": (
        "torsh_distributed.cli.federated.commands",
        "Train on clients whose data stay where they are.",
    ),
    "ps": ("torsh_distributed.cli.servers.ps_command", "Serve parameters to workers that train them."),
    "store": ("torsh_distributed.cli.servers.store", "Serve a key-value store for ranks to meet in."),
}

app = typer.Typer(
    name="torsh",
    cls=lazy_group(COMMANDS),
    help="Distributed training for PyTorch: one plan from a laptop to a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from torsh_distributed import __version__

        typer.echo(f"torsh-distributed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    set_log_level(os.environ, default="WARNING")


def main() -> None:
    """Entry point of `torsh`: one of our errors, or about a path, is a readable paragraph and exit status 1."""
    with errors_in_words():
        app()


if __name__ == "__main__":
    main()
