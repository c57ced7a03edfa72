"""Another number of workers for a job over SSH, by the launcher on the host that leads it."""

from __future__ import annotations

import shlex

from torsh_distributed.clusters.engine_programs import ask_program
from torsh_distributed.launch.ssh.remote_hosts import RemoteHost
from torsh_distributed.launch.ssh.ssh_client import SshClient

_TIMEOUT_S = 30.0


def scale_on_host(host: RemoteHost, client: SshClient, job: str, workers: int) -> str:
    """What the launcher answers; raises CommunicationError with what it says against it."""
    words = [client.python, "-m", "torsh_distributed.launch.ssh.host_scale", job, str(workers)]
    command = [*client.command(host)[:-1], f"exec {shlex.join(words)}"]
    return ask_program(command, timeout_s=_TIMEOUT_S, hint="was the job submitted with --elastic, and does it run?")
