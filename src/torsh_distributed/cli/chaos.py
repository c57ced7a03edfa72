"""`torsh chaos`: run a script under a launcher while faults happen to its ranks, and say how it went on."""

from __future__ import annotations

import json as json_format
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.errors import InvalidArgument

if TYPE_CHECKING:
    from torsh_distributed.elastic.faults.fault import Fault, FaultKind
    from torsh_distributed.elastic.faults.fault_log import FaultOutcome

# Options after ours belong to the launcher, those after the script to the script.
CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
LAUNCHERS = {"torsh": "torsh_distributed.run", "torchrun": "torch.distributed.run"}

Command = Annotated[list[str], typer.Argument(help="Options of the launcher, the script, and its arguments.")]
FaultText = Annotated[
    list[str] | None,
    typer.Option("--fault", help="A fault such as 'kill rank 2 at step 5 in backward'; may be given several times."),
]
NumRandom = Annotated[
    int, typer.Option("--random", min=0, max=10**5, help="Add this many faults at random ranks, steps and points.")
]
Seed = Annotated[int, typer.Option(help="Seed of the random faults: the same seed, the same faults.")]
Kinds = Annotated[str, typer.Option(help="Kinds of the random faults, with commas.")]
Points = Annotated[str, typer.Option(help="Points of the random faults, with commas; empty is the start of a step.")]
Ranks = Annotated[int, typer.Option(min=1, max=10**6, help="Ranks that the random faults choose from.")]
Steps = Annotated[int, typer.Option(min=1, max=10**12, help="Steps that the random faults choose from.")]
Seconds = Annotated[float, typer.Option(help="Duration of the random faults that need one.")]
Launcher = Annotated[str, typer.Option(help="torsh (`torsh run`) or torchrun, for comparison.")]
Log = Annotated[Path | None, typer.Option(help="Keep the log of faults and steps in this file.")]
Json = Annotated[bool, typer.Option("--json", help="Report the faults as one JSON object on stderr.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings=CONTEXT_SETTINGS)
def chaos(
    command: Command,
    fault: FaultText = None,
    num_random: NumRandom = 0,
    seed: Seed = 0,
    kinds: Kinds = "kill,stop",
    points: Points = ",forward,backward,optimizer",
    ranks: Ranks = 2,
    steps: Steps = 10,
    seconds: Seconds = 1.0,
    launcher: Launcher = "torsh",
    log: Log = None,
    json: Json = False,
) -> None:
    """Run a script while faults happen to its ranks, and say how soon it went on after each.

    torsh chaos --fault "kill rank 1 at step 5" --nproc-per-node 2 --max-restarts 1 train.py. The script needs no
    change: an Engine passes the points of a step by itself, and of a plain torch loop they are torch's own.
    """
    from torsh_distributed.elastic.faults.fault import Fault, random_faults

    if launcher not in LAUNCHERS:
        raise InvalidArgument("--launcher is torsh or torchrun", got=launcher)
    chosen = [Fault.parse(text) for text in fault or ()]
    if num_random:
        chosen += random_faults(
            seed,
            num_faults=num_random,
            num_ranks=ranks,
            num_steps=steps,
            kinds=[_kind(kind.strip()) for kind in kinds.split(",")],
            points=[point.strip() for point in points.split(",")],
            seconds=seconds,
        )
    if not chosen:
        raise InvalidArgument("there is no fault to inject", hint="add --fault 'kill rank 1 at step 5', or --random 3")
    for one in chosen:
        typer.echo(f"torsh chaos: will {one}", err=True)
    with tempfile.TemporaryDirectory(prefix="torsh-chaos-") as folder:
        place = log or Path(folder) / "faults.jsonl"
        status = subprocess.call(
            [sys.executable, "-m", LAUNCHERS[launcher], *command], env=chaos_environment(chosen, place)
        )
        _report(chosen, place, is_json=json)
    raise typer.Exit(status)


def chaos_environment(faults: list[Fault], log: Path) -> dict[str, str]:
    """The environment under which the workers of any launcher inject `faults` and write the log."""
    from torsh_distributed.elastic.faults.fault import LOG_VARIABLE, faults_environment
    from torsh_distributed.launch.local.worker_variables import STARTUP_DIRECTORY

    path = os.pathsep.join(filter(None, (str(STARTUP_DIRECTORY), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **faults_environment(*faults), LOG_VARIABLE: str(log.absolute()), "PYTHONPATH": path}


def _report(faults: list[Fault], log: Path, *, is_json: bool) -> None:
    from torsh_distributed.elastic.faults.fault_log import fault_outcomes, read_fault_log

    outcomes = fault_outcomes(read_fault_log(log))
    happened = [str(one.fault) for one in outcomes]
    missed = [str(one) for one in faults if str(one) not in happened]
    if is_json:
        record = {"faults": [_plain(one) for one in outcomes], "not_reached": missed}
        typer.echo(json_format.dumps(record), err=True)
        return
    for one in outcomes:
        typer.echo(f"torsh chaos: {one.fault}: {_in_words(one)}", err=True)
    for text in missed:
        typer.echo(f"torsh chaos: {text}: its point was never reached", err=True)


def _plain(one: FaultOutcome) -> dict[str, object]:
    return {
        "fault": str(one.fault),
        "time": one.time,
        "next_step_s": one.next_step_s,
        "caught_up_s": one.caught_up_s,
    }


def _in_words(one: FaultOutcome) -> str:
    if one.next_step_s is None:
        return "no step was done after it"
    text = f"next step after {one.next_step_s:.3f} s"
    if one.caught_up_s is None:
        return f"{text}, but its own step was never done again"
    return text if one.caught_up_s == one.next_step_s else f"{text}, its own step done after {one.caught_up_s:.3f} s"


def _kind(text: str) -> FaultKind:
    from torsh_distributed.elastic.faults.fault import FaultKind

    if text not in {kind.value for kind in FaultKind}:
        raise InvalidArgument(f"there is no kind of fault {text!r}", hint=f"one of {', '.join(FaultKind)}")
    return FaultKind(text)
