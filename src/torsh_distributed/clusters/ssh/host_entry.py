"""Whether hosts can be entered by ssh and have this library, asked before a job is sent to the background."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from torsh_distributed.errors import CommunicationError, OperationTimeout
from torsh_distributed.launch.ssh.remote_hosts import RemoteHost
from torsh_distributed.launch.ssh.ssh_client import FAILED, SshClient, explain_failure

_TIMEOUT_S = 60.0


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
            said = process.communicate(timeout=_TIMEOUT_S)[1].splitlines()
            if process.returncode == FAILED:
                failure = explain_failure(host, said)
                problems.append(f"{host.target}: {failure.said}")
                hints.append(failure.hint)
            elif process.returncode:
                problems.append(f"{host.target}: {said[-1] if said else f'exit code {process.returncode}'}")
                hints.append("install torsh-distributed there, or name the Python that has it: --set python=…")
    except subprocess.TimeoutExpired:
        raise OperationTimeout(
            f"{host.target} did not answer within {_TIMEOUT_S:g} s",
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
