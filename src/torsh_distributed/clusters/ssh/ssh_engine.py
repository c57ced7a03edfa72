"""SSH as an engine: `torsh run --ssh` in the background of this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from torsh_distributed.clusters.base import ClusterEngine, JobStatus
from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.engine_programs import ask_program, required_program
from torsh_distributed.clusters.job_records import find_record
from torsh_distributed.clusters.local.background_jobs import (
    background_logs,
    background_status,
    cancel_background,
    start_in_background,
)
from torsh_distributed.clusters.run_arguments import entry_arguments, rank_variables, refuse_limits
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout
from torsh_distributed.launch.ssh.ssh_client import FAILED, RemoteHost, SshClient, explain_failure, parse_hosts
from torsh_distributed.upward import COMMAND_LINE

_ENTRY_TIMEOUT_S = 60.0


def require_entry(client: SshClient, hosts: Sequence[RemoteHost]) -> None:
    """Enter all hosts at once; raises CommunicationError with the reason of each that does not let us in.

    A job in the background could only write that into its log, after `torsh submit` has succeeded.
    """
    import_ours = f"exec {shlex.quote(client.python)} -c 'import torsh_distributed'"
    entering = [
        subprocess.Popen(
            [*client.command(host)[:-1], import_ours],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for host in hosts
    ]
    problems, hints = [], []
    try:
        for host, process in zip(hosts, entering, strict=True):
            said = process.communicate(timeout=_ENTRY_TIMEOUT_S)[1].splitlines()
            if process.returncode == FAILED:
                failure = explain_failure(host, said)
                problems.append(f"{host.target}: {failure.said}")
                hints.append(failure.hint)
            elif process.returncode:
                problems.append(f"{host.target}: {said[-1] if said else f'exit code {process.returncode}'}")
                hints.append("install torsh-distributed there, or name the Python that has it: --set python=…")
    except subprocess.TimeoutExpired:
        raise OperationTimeout(
            f"{host.target} did not answer within {_ENTRY_TIMEOUT_S:g} s",
            hint=f"try it by hand: ssh {host.target}",
            operation="ssh",
        ) from None
    finally:
        for process in entering:
            if process.poll() is None:
                process.kill()
                process.communicate()
    if problems:
        raise CommunicationError(
            "the job was not submitted: " + "; ".join(problems),
            hint="; ".join(dict.fromkeys(hints)),
            hosts=", ".join(host.target for host in hosts),
        )


_TIMEOUT_S = 30.0


def scale_on_host(host: RemoteHost, client: SshClient, job: str, workers: int) -> str:
    """What the launcher answers; raises CommunicationError with what it says against it."""
    words = [client.python, "-m", "torsh_distributed.launch.ssh.host_scale", job, str(workers)]
    command = [*client.command(host)[:-1], f"exec {shlex.join(words)}"]
    return ask_program(command, timeout_s=_TIMEOUT_S, hint="was the job submitted with --elastic, and does it run?")


OPTIONS = {
    "hosts": "NAME:SLOTS with commas, as a:4,b:4; slots are the most ranks that a host takes",
    "config": "configuration of ssh instead of ~/.ssh/config",
    "python": "Python on the hosts",
    "port_range": "FIRST-LAST, the only ports to listen on",
    "master_port": "port on the first host where launchers meet",
    "heartbeat_timeout": "seconds of silence after which a host counts as lost; more where hosts are overloaded",
}
_GRACE_S = 40.0  # beyond the 25 s that launchers give workers to save


class SshEngine(ClusterEngine):
    """Jobs on hosts that this user can enter by ssh without a password."""

    def __init__(self, options: Mapping[str, str]) -> None:
        require_known_options("ssh", options, OPTIONS)
        if not options.get("hosts"):
            raise InvalidArgument("the engine 'ssh' needs hosts", hint="--set hosts=a:4,b:4")
        self._options = dict(options)
        self._hosts = parse_hosts(options["hosts"])

    @override
    def render(self, submission: Submission) -> str:
        return shlex.join(self._command(submission))

    @override
    def submit(self, submission: Submission) -> str:

        required_program("ssh", hint="install OpenSSH (openssh-client)")
        require_entry(self._client(), self._chosen(submission))
        start_in_background(
            submission.name,
            self._command(submission),
            directory=submission.working_dir,
            env={**os.environ, **rank_variables(submission)},
            time_limit_s=submission.time_limit_s,
        )
        return submission.name

    def _command(self, submission: Submission) -> list[str]:
        refuse_limits(submission, engine="ssh")
        hosts = ",".join(f"{host.target}:{submission.workers_per_node}" for host in self._chosen(submission))
        words = [sys.executable, "-m", COMMAND_LINE, "run", "--ssh", "--hosts", hosts]
        for name in ("config", "python"):
            words += [f"--ssh-{name}", self._options[name]] if name in self._options else []
        for name in ("port_range", "master_port", "heartbeat_timeout"):
            words += [f"--{name.replace('_', '-')}", self._options[name]] if name in self._options else []
        words += [word for name in sorted(rank_variables(submission)) for word in ("--carry", name)]
        return [*words, *entry_arguments(submission)]

    def _client(self) -> SshClient:
        config = self._options.get("config")
        return SshClient(
            config=None if config is None else Path(config), python=self._options.get("python", sys.executable)
        )

    def _chosen(self, submission: Submission) -> list[RemoteHost]:
        """The first hosts that are needed; raises CommunicationError with what there is if that is not enough."""
        fitting = self._fitting(submission.workers_per_node)
        if len(fitting) < submission.nodes:
            there = ", ".join(
                f"{host.target} ({host.num_workers} slots)" if host.num_workers else host.target for host in self._hosts
            )
            raise CommunicationError(
                f"the job asks for {submission.nodes} hosts with {submission.workers_per_node} ranks each; there are "
                f"{len(fitting)} of {len(self._hosts)}: {there}",
                hint="lower --nodes or --nproc-per-node, or name more hosts: --set hosts=…",
            )
        return fitting[: submission.nodes]

    def _fitting(self, workers_per_node: int) -> list[RemoteHost]:
        """The hosts that take so many ranks, in order; a job's first one leads it."""
        return [host for host in self._hosts if host.num_workers is None or host.num_workers >= workers_per_node]

    @override
    def status(self, job_id: str) -> JobStatus:
        return background_status(job_id)

    @override
    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        return background_logs(job_id, follow=follow)

    @override
    def cancel(self, job_id: str) -> None:
        cancel_background(job_id, grace_s=_GRACE_S)

    @override
    def scale(self, job_id: str, workers: int) -> None:
        """Ask the launcher on the host that leads; raises with its answer if the job is not elastic."""

        record = find_record(job_id)
        leader = self._fitting(record.workers // record.nodes)[0]
        scale_on_host(leader, self._client(), job_id, workers)
