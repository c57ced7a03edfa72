"""`torsh top`: a job at the terminal, from its event files or from the address of its page."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from torsh_distributed.errors import CommunicationError

app = typer.Typer(add_completion=False)
_TIMEOUT_S = 5.0
_MAX_STATE_BYTES = 1 << 26
_MOST_RANKS = 32


@app.command()
def top(
    target: Annotated[
        str,
        typer.Argument(
            envvar="TORSH_EVENTS_DIR", help="Directory of event files, or a page such as http://127.0.0.1:8080/."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
) -> None:
    """Show a job at the terminal: its event files, or a page's address."""
    from rich.console import Console
    from rich.live import Live

    state = state_source(target)
    console = Console()
    if once:
        console.print(drawing(state()))
        return
    newest = state()
    with Live(drawing(newest), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while newest["job"]["state"] not in ("finished", "failed"):
            threading.Event().wait(1.0)
            try:
                newest = state()
            except CommunicationError:  # the page of a job ends with the job
                break
            live.update(drawing(newest), refresh=True)
    if console.is_terminal:
        console.print(drawing(newest))
    if newest["job"]["state"] not in ("finished", "failed"):
        console.print("the page has closed: the job has ended, or its launcher is gone")


def state_source(target: str) -> Callable[[], dict[str, Any]]:
    """A function that gives the newest state of the job at `target`."""
    if target.startswith(("http://", "https://")):
        return lambda: _fetch(target)
    from torsh_distributed.observe.job.page_state import page_state
    from torsh_distributed.observe.job.run_files import EventFiles

    files = EventFiles(Path(target))
    files.read_all()

    def newest() -> dict[str, Any]:
        files.poll()
        return page_state(files.view)

    return newest


def _fetch(address: str) -> dict[str, Any]:
    base, _, token = address.partition("?token=")
    request = urllib.request.Request(base.rstrip("/") + "/state.json")  # noqa: S310 - http or https
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            state = json.loads(answer.read(_MAX_STATE_BYTES))
    # What a port that is not a number, or another server's answer, raises.
    except (OSError, ValueError, OverflowError, RecursionError, HTTPException) as error:
        raise CommunicationError(
            "the page does not answer", hint="is the job still running?", address=base, reason=str(error)
        ) from error
    if not isinstance(state, dict) or "job" not in state:
        raise CommunicationError("another program answers there, not a job's page", address=base)
    found: dict[str, Any] = state
    return found


def drawing(state: dict[str, Any]) -> Any:
    """The job in a few lines and a table of its ranks."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    job = state["job"]
    figures = (
        f"step {_number(job['step'])}",
        f"loss {_number(job['loss'])}",
        f"{_number(job['samples_per_s'])} samples/s",
        *(f"{name} {show(job[key])}" for name, key, show in _IF_KNOWN if job.get(key) is not None),
    )
    place = f"{job['world_size']} ranks on {job['num_nodes']} nodes"
    lines = [
        f"{job['run_id']}  {job['state']}  {job['command']}",
        "  ".join([*figures, place, job["backend"] or ""]),
        "  ".join(f"{part} {_ms(value)}" for part, value in state["parts"].items()),
    ]
    lines += [f"rank {one['rank']} is {one['slowdown']:.0%} slower than the others" for one in state["stragglers"]]
    lines += [
        f"rank {one['rank']} has a risk of {one['score']:.2f}: {one['detail']}" for one in state.get("rank_risks", [])
    ]
    lines += [f"{one['share']:.0%} {one['kind']}: {one['evidence']}" for one in state.get("bottlenecks", [])[:2]]
    for one in state.get("recommendations", [])[:1]:
        gain = "" if one["gain_s"] is None else f", {'up to ' if one['is_bound'] else ''}{_ms(one['gain_s'])} a step"
        lines.append(f"try: {one['title']}{gain}")
    lines += [f"{alert['severity']}: {alert['name']}: {alert['message']}" for alert in state["alerts"]]
    table = Table("rank", "node", *("step", "step time", "busy", "waiting", "data", "memory", "device", "cores", "MFU"))
    for column in table.columns[2:]:
        column.justify = "right"
    slowest = sorted(state["ranks"], key=lambda rank: -(rank["busy_s"] or 0))[:_MOST_RANKS]
    for rank in sorted(slowest, key=lambda rank: rank["rank"]):
        table.add_row(
            str(rank["rank"]),
            Text(str(rank["node"] or "")),
            _number(rank["step"]),
            _ms(rank["step_s"]),
            _ms(rank["busy_s"]),
            _share(rank["wait_share"]),
            _share(rank["data_share"]),
            _mb(rank["memory"]),
            _mb(rank["device_memory"]),
            _number(rank["cores"]),
            _share(rank.get("mfu")),
        )
    more = len(state["ranks"]) - len(slowest)
    footer = [Text(f"and {more} ranks that are busy for less time")] if more > 0 else []
    return Group(*(Text(line) for line in lines), table, *footer)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.5g}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _minutes(value: float) -> str:
    return f"{value / 60:,.1f} min" if value >= 60 else f"{value:.0f} s"


_IF_KNOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("epochs done", "epoch", _number),
    ("validation loss", "validation_loss", _number),
    ("GPUs busy", "gpu_utilization", _share),
    ("left", "remaining_s", _minutes),
)


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f} MB"
