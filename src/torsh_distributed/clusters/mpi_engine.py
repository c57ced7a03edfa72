"""`torsh submit --to mpi`: ranks started by mpiexec, whose command line is written here."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import socket
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from typing_extensions import override

from torsh_distributed.clusters.base import ClusterEngine, JobStatus
from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.engine_programs import ask_program, fixed_size
from torsh_distributed.clusters.job_records import job_directory
from torsh_distributed.clusters.local.background_jobs import (
    background_logs,
    background_status,
    cancel_background,
    start_in_background,
)
from torsh_distributed.clusters.ranks.rank_reports import job_variables, rank_command, report_directory, with_cause
from torsh_distributed.clusters.run_arguments import refuse_limits
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.comm.meeting.network_interface import LEG_VARIABLE, chosen_leg
from torsh_distributed.comm.trust.job_secret import new_secret, write_secret_file
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.ports import meeting_variables, require_port_limit
from torsh_distributed.launch.spec import LOOPBACK, parse_port_range
from torsh_distributed.private_files import state_directory

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


OPTIONS = {
    "mpiexec": "program to start ranks with; default: the one beside this Python, else on the PATH",
    "hosts": "hosts with commas; default: this machine",
    "hostfile": "file of hosts, as mpiexec reads it",
    "master_addr": "address of the first host, where rank 0 serves the store",
    "port_range": "FIRST-LAST, the only ports to listen on",
    "between_nodes": "mpi: data between nodes goes over MPI's fabric; default: gloo over TCP",
    "args": "further options of mpiexec, as they are",
}
_GRACE_S = 20.0
_TOKEN = "token"  # noqa: S105 - the name of a file


class MpiEngine(ClusterEngine):
    """Jobs of mpiexec. On several hosts the job's directory must be on a file system that they share."""

    def __init__(self, options: Mapping[str, str]) -> None:
        require_known_options("mpi", options, OPTIONS)
        self._options = dict(options)

    @override
    def render(self, submission: Submission) -> str:
        """The command line, under the variables that it passes on; values of the user's own are not shown."""
        folder = state_directory() / "jobs" / submission.name
        hidden = dataclasses.replace(submission, env=dict.fromkeys(submission.env, "…"))
        env = self._variables(hidden, folder)
        lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())]
        return "\n".join([*lines, shlex.join(self._command(submission, env))])

    @override
    def submit(self, submission: Submission) -> str:
        folder = job_directory(submission.name)
        report_directory(folder)
        env = self._variables(submission, folder)
        command = self._command(submission, env)
        write_secret_file(folder / _TOKEN, new_secret())
        start_in_background(
            submission.name,
            command,
            directory=submission.working_dir,
            env={**os.environ, **env},
            time_limit_s=submission.time_limit_s,
        )
        return submission.name

    def _command(self, submission: Submission, env: Mapping[str, str]) -> list[str]:
        refuse_limits(submission, engine="mpi")
        if submission.max_restarts or submission.elastic is not None:
            raise FeatureNotAvailable(
                "a job of mpiexec ends with its first rank: --max-restarts and --elastic have no effect",
                hint="leave them out, or use the engine 'ssh' on the same hosts",
            )
        if submission.nodes > 1 and not self._is_on_hosts:
            raise InvalidArgument(
                f"--nodes {submission.nodes} needs hosts", hint="--set hosts=a,b or --set hostfile=FILE"
            )
        program = find_mpiexec(self._options.get("mpiexec"))
        launcher = which_launcher(program)
        command = rank_command(submission)
        if launcher is MpiLauncher.MPICH and self._is_on_hosts:
            # MPICH 5's -genvlist does not bring this one to other hosts; where to meet is not a secret.
            command = ["env", f"MASTER_PORT={env['MASTER_PORT']}", *command]
        return mpiexec_command(program, launcher, submission, self._options, command=command, variables=env)

    @property
    def _is_on_hosts(self) -> bool:
        return bool(self._options.get("hosts") or self._options.get("hostfile"))

    def _variables(self, submission: Submission, folder: Path) -> dict[str, str]:
        """What ranks get on top of mpiexec's own. The store's port is free here, or drawn from the job's name."""
        env = job_variables(submission, reports=folder / "reports", secret_file=folder / _TOKEN)
        port = _port_of(submission.name) if self._is_on_hosts else _free_port()
        if "port_range" in self._options:
            require_port_limit()
            ports = parse_port_range(self._options["port_range"])
            env = {**env, **meeting_variables(ports, {**os.environ, **env})}
        if "between_nodes" in self._options:
            env.setdefault(LEG_VARIABLE, self._options["between_nodes"])
            chosen_leg(None, env)  # what it cannot be is said now
        env.setdefault("MASTER_ADDR", self._master())
        env.setdefault("MASTER_PORT", str(port))
        return env

    def _master(self) -> str:
        if "master_addr" in self._options:
            return self._options["master_addr"]
        if not self._is_on_hosts:
            return LOOPBACK
        if not self._options.get("hosts"):
            raise InvalidArgument(
                "with a hostfile the address of the first host must be given", hint="--set master_addr=NAME"
            )
        return self._options["hosts"].split(",")[0].partition(":")[0].strip()

    @override
    def status(self, job_id: str) -> JobStatus:
        return with_cause(background_status(job_id), state_directory() / "jobs" / job_id / "reports")

    @override
    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        return (with_rank(line) for line in background_logs(job_id, follow=follow))

    @override
    def cancel(self, job_id: str) -> None:
        cancel_background(job_id, grace_s=_GRACE_S)

    @override
    def scale(self, job_id: str, workers: int) -> None:
        raise fixed_size("mpi")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        port: int = sock.getsockname()[1]
        return port


def _port_of(name: str) -> int:
    """A port that other jobs rarely have: nobody here knows which ones are free on the first host."""
    return 10_000 + zlib.crc32(name.encode()) % 20_000
