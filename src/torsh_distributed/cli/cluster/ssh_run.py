"""`torsh run --ssh`: the job that its options make."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from torsh_distributed.cli.run.options import SshOptions
from torsh_distributed.errors import InvalidArgument

if TYPE_CHECKING:
    from torsh_distributed.launch.spec import JobSpec
    from torsh_distributed.launch.ssh.ssh_client import RemoteHost, SshClient


@dataclass(frozen=True, kw_only=True)
class SshRun:
    """Where a job is started over SSH, and how."""

    hosts: tuple[RemoteHost, ...]
    num_workers: int
    counts: tuple[int, ...]
    """Workers on each host."""
    client: SshClient
    variables: dict[str, str]

    def launch(self, spec: JobSpec) -> int:
        """Run the job; returns its exit code."""
        from torsh_distributed.launch.ssh.remote_job import launch_over_ssh

        return launch_over_ssh(spec, self.hosts, client=self.client, directory=Path.cwd(), variables=self.variables)

    def describe(self, spec: JobSpec) -> int:
        """Print what `launch` would do."""
        from torsh_distributed.launch.ssh.remote_job import describe_remote_job

        lines = describe_remote_job(
            spec, self.hosts, client=self.client, directory=Path.cwd(), variables=self.variables
        )
        typer.echo("\n".join(lines))
        return 0


def ssh_hosts(given: SshOptions, *, nproc_per_node: int, may_differ: bool = False) -> SshRun | None:
    """The hosts of a job over SSH; None if it is not one. Options that would have no effect are an error.

    Where they `may_differ`, hosts may have different numbers of workers.
    """
    if not given.ssh:
        idle = [f"--{name.replace('_', '-')}" for name, value in given._asdict().items() if value]
        if idle:
            raise InvalidArgument(f"{', '.join(idle)} without --ssh has no effect", hint="add --ssh")
        return None
    if not given.hosts:
        raise InvalidArgument("--ssh needs the hosts to start on", hint="for example --hosts a:4,b:4")
    config, options, carry = given.ssh_config, tuple(given.ssh_option or ()), given.carry or ()
    if config is not None and not config.is_file():
        raise InvalidArgument("the file of --ssh-config does not exist", path=str(config))
    unnamed = next((option for option in options if "=" not in option.strip("=")), None)
    if unnamed is not None:
        raise InvalidArgument("--ssh-option takes NAME=VALUE", hint="for example Port=2222", got=unnamed)
    from torsh_distributed.launch.ssh.host_order import carried_variables
    from torsh_distributed.launch.ssh.ssh_client import SshClient, parse_hosts, workers_per_host

    parsed = parse_hosts(given.hosts)
    counts = tuple(host.num_workers or nproc_per_node for host in parsed)
    missing = [name for name in carry if name not in os.environ]
    if missing:
        raise InvalidArgument(f"--carry {missing[0]}: no such variable is set here", hint="set it, or leave it out")
    python = {} if given.ssh_python is None else {"python": given.ssh_python}
    return SshRun(
        hosts=parsed,
        num_workers=max(counts) if may_differ else workers_per_host(parsed, nproc_per_node),
        counts=counts,
        client=SshClient(config=config, options=options, **python),
        variables=carried_variables(os.environ, carry),
    )
