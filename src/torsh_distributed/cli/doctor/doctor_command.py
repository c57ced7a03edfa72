"""`torsh doctor`: check this machine before a run, or say what a running job is stuck in."""

from __future__ import annotations

import json
import json as json_format
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import parse_endpoint
from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult

_NUM_RANKS = 2
_LIMIT_S = 120.0
_SHOWN_LINES = 8


def check_all_reduce() -> DiagnosticResult:
    """Start two ranks, sum known values on every usable backend, compare; says how long it took."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torsh-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        command = [
            *(sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", str(_NUM_RANKS)),
            *("-m", "torsh_distributed.cli.doctor.all_reduce_worker", str(answer)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, cwd=folder)
            problem = (
                "" if done.returncode == 0 else "\n".join((done.stderr + done.stdout).splitlines()[-_SHOWN_LINES:])
            )
        except subprocess.TimeoutExpired:
            problem = f"no end within {_LIMIT_S:g} s"
        took = json.loads(answer.read_text()) if answer.exists() else {}
    wall_s = time.monotonic() - started_s
    if problem:
        return DiagnosticResult(
            check_name="all-reduce",
            severity=CheckSeverity.ERROR,
            description=f"an all-reduce of {_NUM_RANKS} processes failed: {problem}",
            reason="every training step does this",
            remediation="the lines above are the launcher's report on it; the checks above may say why",
            data=took,
        )
    shown = ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in took.items())
    return DiagnosticResult(
        check_name="all-reduce",
        description=f"{_NUM_RANKS} processes summed known values in {wall_s:.1f} s; 4 KiB take {shown}",
        data=took,
    )


_JOB, _MACHINE = "A running job", "This machine"
_CLOCK_PORT = 29511
_STUCK_STATUS = 3

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    job: Annotated[
        str | None, typer.Option(help="Name of a running job (--rdzv-id), or `all` for a list.", rich_help_panel=_JOB)
    ] = None,
    pid: Annotated[int | None, typer.Option(help="Process id of a job's launcher.", rich_help_panel=_JOB)] = None,
    json: Annotated[bool, typer.Option("--json", help="Answer as one JSON object.")] = False,
    peer: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of another node: compare its clock with this one's.", rich_help_panel=_MACHINE),
    ] = None,
    serve_clock: Annotated[
        str | None,
        typer.Option(help="ADDRESS:PORT: answer `--peer` of other nodes until interrupted.", rich_help_panel=_MACHINE),
    ] = None,
    all_reduce: Annotated[
        bool,
        typer.Option(
            "--all-reduce/--no-all-reduce",
            help="End with a real all-reduce of two processes.",
            rich_help_panel=_MACHINE,
        ),
    ] = True,
) -> None:
    """Check this machine before a run, or say what a running job is stuck in.

    Exit status: 0 all is well, 1 something will fail, 3 a job is stuck.
    """
    if job is not None and pid is not None:
        raise InvalidArgument("--job and --pid say the same thing twice", hint="give one of the two")
    if serve_clock is not None:
        _serve_clock(serve_clock)
    elif job == "all":
        _list_jobs(as_json=json)
    elif job is not None or pid is not None:
        _ask(pid if pid is not None else _find(job or ""), as_json=json)
    else:
        _check_machine(peer, runs_all_reduce=all_reduce, as_json=json)


def _find(name: str) -> int:
    """The launcher's process id of the job with that name."""
    from torsh_distributed.launch.control.job_commands import find_job

    return find_job(name).pid


def _list_jobs(*, as_json: bool) -> None:
    from dataclasses import asdict

    from torsh_distributed.launch.control.job_commands import running_jobs

    jobs = running_jobs()
    if as_json:
        typer.echo(json_format.dumps([asdict(job) for job in jobs]))
        return
    for job in jobs:
        typer.echo(f"{job.run_id}  pid {job.pid}  {job.num_ranks} ranks  {job.command}")
    if not jobs:
        typer.echo("no job of yours runs on this machine")


def _ask(pid: int, *, as_json: bool) -> None:
    from torsh_distributed.launch.control.job_commands import ask_launcher

    found = ask_launcher(pid, "diagnosis")
    typer.echo(json_format.dumps(found) if as_json else "\n".join(_diagnosis_lines(found)))
    raise typer.Exit(_STUCK_STATUS if found["is_stuck"] else 0)


def _diagnosis_lines(found: dict[str, Any]) -> list[str]:
    lines = [found["text"]]
    if found["stack"]:
        lines += [f"rank {found['rank']} is at:", *(f"  {line}" for line in found["stack"])]
    return [*lines, *found["ranks"]]


def _serve_clock(endpoint: str) -> None:
    from torsh_distributed.observe.machine.clock_skew import serve_clock

    host, port = parse_endpoint(endpoint)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port or _CLOCK_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.bind(address)
        typer.echo(f"the clock of this machine answers at {host}:{sock.getsockname()[1]} until Ctrl-C")
        serve_clock(sock)


def _check_machine(peer: str | None, *, runs_all_reduce: bool, as_json: bool) -> None:
    from torsh_distributed.observe.machine.clock_skew import check_clock
    from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, worst
    from torsh_distributed.observe.machine.software import validate_environment

    results: list[DiagnosticResult] = []

    def take(result: DiagnosticResult) -> None:
        results.append(result)
        if not as_json:
            _show(result)

    for result in validate_environment(os.environ):
        take(result)
    if peer is not None:
        host, port = parse_endpoint(peer)
        take(check_clock(host, port or _CLOCK_PORT))
    if runs_all_reduce:
        take(check_all_reduce())
    status = 1 if worst(results) is CheckSeverity.ERROR else 0
    if as_json:
        report = {"exit_code": status, "results": [result.to_dict() for result in results]}
        typer.echo(json_format.dumps(report, indent=2, default=str))
    else:
        bad = sum(not result.passed for result in results)
        typer.echo(f"{len(results)} checks, {bad} to look at" if bad else f"{len(results)} checks, all well")
    raise typer.Exit(status)


def _show(result: Any) -> None:
    """One finding: what, and if something is wrong why it matters and what to do."""
    colours = {"ok": typer.colors.GREEN, "note": typer.colors.CYAN, "warning": typer.colors.YELLOW}
    mark = typer.style(
        f"{result.severity.value:>7}", fg=colours.get(result.severity.value, typer.colors.RED), bold=True
    )
    typer.echo(f"{mark}  {result.check_name}: {result.description}")
    if result.reason:
        typer.echo(f"         why: {result.reason}")
    if result.remediation:
        typer.echo(f"         do:  {result.remediation}")
