"""`torsh run --ssh`: its options, and the job they make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.errors import InvalidArgument

if TYPE_CHECKING:
    from torsh_distributed.launch.spec import JobSpec
    from torsh_distributed.launch.ssh.remote_hosts import RemoteHost
    from torsh_distributed.launch.ssh.ssh_client import SshClient

_PANEL = "Hosts over SSH"

Ssh = Annotated[
    bool,
    typer.Option(
        "--ssh", help="Start one launcher on each of --hosts over SSH, and run from here.", rich_help_panel=_PANEL
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(help="NAME:WORKERS with commas, as a:4,b:4; the first one leads.", rich_help_panel=_PANEL),
]
SshConfig = Annotated[
    Path | None,
    typer.Option(help="Configuration of ssh instead of ~/.ssh/config.", rich_help_panel=_PANEL),
]
SshOption = Annotated[
    list[str] | None,
    typer.Option(help="A setting of ssh, NAME=VALUE, such as Port=2222.", rich_help_panel=_PANEL),
]
SshPython = Annotated[
    str | None,
    typer.Option(help="Python on the hosts. Default: the path of this one.", rich_help_panel=_PANEL),
]
Carry = Annotated[
    list[str] | None,
    typer.Option(
        help="Variable to carry to the hosts, beside those of PyTorch, CUDA, NCCL and this library.",
        rich_help_panel=_PANEL,
    ),
]


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


def ssh_hosts(
    wanted: bool,
    hosts: str | None,
    *,
    config: Path | None,
    options: Sequence[str],
    python: str | None,
    carry: Sequence[str],
    nproc_per_node: int,
    may_differ: bool = False,
) -> SshRun | None:
    """The hosts of a job over SSH; None if it is not one. Options that would have no effect are an error.

    Where they `may_differ`, hosts may have different numbers of workers.
    """
    given = {
        "--hosts": hosts,
        "--ssh-config": config,
        "--ssh-option": options,
        "--ssh-python": python,
        "--carry": carry,
    }
    if not wanted:
        idle = [name for name, value in given.items() if value]
        if idle:
            raise InvalidArgument(f"{', '.join(idle)} without --ssh has no effect", hint="add --ssh")
        return None
    if not hosts:
        raise InvalidArgument("--ssh needs the hosts to start on", hint="for example --hosts a:4,b:4")
    if config is not None and not config.is_file():
        raise InvalidArgument("the file of --ssh-config does not exist", path=str(config))
    unnamed = next((option for option in options if "=" not in option.strip("=")), None)
    if unnamed is not None:
        raise InvalidArgument("--ssh-option takes NAME=VALUE", hint="for example Port=2222", got=unnamed)
    from torsh_distributed.launch.ssh.host_order import carried_variables
    from torsh_distributed.launch.ssh.remote_hosts import parse_hosts, workers_per_host
    from torsh_distributed.launch.ssh.ssh_client import SshClient

    parsed = parse_hosts(hosts)
    counts = tuple(host.num_workers or nproc_per_node for host in parsed)
    missing = [name for name in carry if name not in os.environ]
    if missing:
        raise InvalidArgument(f"--carry {missing[0]}: no such variable is set here", hint="set it, or leave it out")
    return SshRun(
        hosts=parsed,
        num_workers=max(counts) if may_differ else workers_per_host(parsed, nproc_per_node),
        counts=counts,
        client=SshClient(config=config, options=tuple(options), **({} if python is None else {"python": python})),
        variables=carried_variables(os.environ, carry),
    )
