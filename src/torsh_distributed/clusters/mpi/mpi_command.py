"""The command line of mpiexec, for MPICH's hydra and for Open MPI. Values of variables are never on it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from torsh_distributed.clusters.engine_programs import ask_program
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import FeatureNotAvailable

_ASK_TIMEOUT_S = 20.0
_LABELS = (
    re.compile(r"\[(\d+)\] ?(.*)"),  # MPICH's -prepend-rank
    re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?(.*)"),  # Open MPI's --tag-output
)


class MpiLauncher(StrEnum):
    """Whose mpiexec it is."""

    MPICH = "MPICH"
    OPEN_MPI = "Open MPI"


def find_mpiexec(chosen: str | None) -> str:
    """The program: the chosen one, the one beside this Python (from `pip install mpich`), or the one on the PATH."""
    beside = shutil.which("mpiexec", path=Path(sys.executable).parent)
    found = shutil.which(chosen) if chosen else beside or shutil.which("mpiexec")
    if found is None:
        raise FeatureNotAvailable(
            f"the program {chosen or 'mpiexec'!r} is not found",
            hint='pip install "torsh-distributed[mpi]" brings MPICH\'s; --set mpiexec=PATH names another',
        )
    return found


def which_launcher(program: str) -> MpiLauncher:
    """Whose mpiexec the program is, from what it says about itself."""
    said = ask_program([program, "--version"], timeout_s=_ASK_TIMEOUT_S, hint="does it run by hand?").lower()
    if "open mpi" in said or "openrte" in said or "prrte" in said:
        return MpiLauncher.OPEN_MPI
    if "hydra" in said or "mpich" in said or "intel" in said:
        return MpiLauncher.MPICH
    raise FeatureNotAvailable(
        f"{program} is neither MPICH's nor Open MPI's mpiexec",
        hint="--set mpiexec=PATH names another",
        says=said.partition("\n")[0],
    )


def mpiexec_command(
    program: str,
    launcher: MpiLauncher,
    submission: Submission,
    options: Mapping[str, str],
    *,
    command: Iterable[str],
    variables: Iterable[str],
) -> list[str]:
    """The whole line. Variables are passed on by name; their values are in mpiexec's own environment."""
    names = sorted(variables)
    hosts = [host.strip() for host in options.get("hosts", "").split(",") if host.strip()]
    words = [program, "-n", str(submission.num_workers)]
    if launcher is MpiLauncher.MPICH:
        words += ["-ppn", str(submission.workers_per_node), "-prepend-rank", "-genvlist", ",".join(names)]
        words += ["-hosts", ",".join(hosts)] if hosts else []
        words += ["-f", options["hostfile"]] if "hostfile" in options else []
    else:
        words += ["--map-by", f"ppr:{submission.workers_per_node}:node:OVERSUBSCRIBE", "--tag-output"]
        words += [word for name in names for word in ("-x", name)]
        slots = [host if ":" in host else f"{host}:{submission.workers_per_node}" for host in hosts]
        words += ["--host", ",".join(slots)] if hosts else []
        words += ["--hostfile", options["hostfile"]] if "hostfile" in options else []
    return [*words, *shlex.split(options.get("args", "")), *command]


def with_rank(line: str) -> str:
    """mpiexec's label as `torsh run` shows it."""
    for label in _LABELS:
        match = label.fullmatch(line)
        if match is not None:
            return f"[rank {match[1]}] {match[2]}"
    return line
