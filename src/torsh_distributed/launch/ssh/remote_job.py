"""`launch_over_ssh`: start a launcher on every host, show what they say, pass signals on, end all or none.

The launchers meet as if `torsh run` had been started on every node: node 0 leads, all prove the job's secret, and one
that falls silent is named by the others. This process holds the connections; if it ends, all launchers do.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torsh_distributed.comm.trust.job_secret import new_secret
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.signals import PASSED_ON, SignalInbox
from torsh_distributed.launch.local.terminal import Terminal
from torsh_distributed.launch.spec import LOOPBACK, JobSpec
from torsh_distributed.launch.ssh.host_connection import HostConnection
from torsh_distributed.launch.ssh.host_order import HostOrder, signal_line
from torsh_distributed.launch.ssh.ssh_client import FAILED, RemoteHost, SshClient, explain_failure

_AFTERWARDS_S = 3.0
"""How long the others may take beyond their own time limits once a host is lost."""


def launch_over_ssh(
    spec: JobSpec,
    hosts: Sequence[RemoteHost],
    *,
    client: SshClient,
    directory: Path,
    variables: Mapping[str, str],
) -> int:
    """Run the job with one launcher per host; blocks until it ends and returns its exit code.

    Every host starts in `directory`, with `variables` on top of its own. Whatever happens, no connection stays open,
    and a launcher without one ends its workers.
    """
    with ExitStack() as stack:
        inbox = stack.enter_context(SignalInbox())
        loop = stack.enter_context(Loop())
        terminal = stack.enter_context(Terminal())
        output = LauncherOutput(terminal, is_json=False)
        job = stack.enter_context(RemoteJob(spec, loop, output))
        loop.watch(inbox.fd, lambda: job.take_signals(inbox))
        orders = host_orders(spec, hosts, client, directory, variables)

        def enter(host: RemoteHost, order: HostOrder) -> HostConnection:
            connection = HostConnection(host, client.command(host), loop, terminal, job.ended)
            job.add(connection, order)
            return connection

        connections = [enter(host, order) for host, order in zip(hosts, orders, strict=True)]
        discovery = None if spec.elastic is None else spec.elastic.discovery
        if discovery is not None:
            from torsh_distributed.launch.ssh.found_hosts import FoundHosts

            found = stack.enter_context(
                FoundHosts(discovery, loop, output, orders[0], enter, connections, is_ending=lambda: job.is_ending)
            )
            job.on_loss = found.lose
        return loop.run()


def host_orders(
    spec: JobSpec, hosts: Sequence[RemoteHost], client: SshClient, directory: Path, variables: Mapping[str, str]
) -> list[HostOrder]:
    """What each host is told. Only node 0 prints the reports that all nodes have."""
    address = spec.master_addr
    elastic = spec.elastic
    if elastic is not None and elastic.discovery is not None:
        discovery = dataclasses.replace(elastic.discovery, is_asked_elsewhere=True)
        spec = dataclasses.replace(spec, elastic=dataclasses.replace(elastic, discovery=discovery))
    if spec.spans_nodes and address == LOOPBACK:
        address = client.host_name(hosts[0])
    token = spec.token or new_secret()
    return [
        HostOrder(
            directory=str(directory),
            env=dict(variables),
            spec=dataclasses.replace(
                spec,
                nnodes=len(hosts),
                node_rank=node_rank,
                master_addr=address,
                token=token,
                repeats_reports=False,
            ),
        )
        for node_rank in range(len(hosts))
    ]


class RemoteJob:
    """The hosts of a job, from the first connection to the end of the last."""

    def __init__(self, spec: JobSpec, loop: Loop, output: LauncherOutput) -> None:
        self._spec = spec
        self._loop = loop
        self._output = output
        self._hosts: list[HostConnection] = []
        self._first_code: int | None = None
        """Exit code of the first host that failed."""
        self._signal: signal.Signals | None = None
        self._is_ending = False
        self._num_first = 0
        self.on_loss: Callable[[HostConnection], None] | None = None
        """Called for a host that ends while the job goes on without it, where others may come for it."""

    def add(self, connection: HostConnection, order: HostOrder) -> None:
        """A host of the job; it starts when it has its order."""
        self._hosts.append(connection)
        if self.on_loss is None:
            self._num_first += 1
        connection.tell(order.to_line())

    @property
    def is_ending(self) -> bool:
        """Whether no host is entered any more."""
        return self._is_ending or self._hosts[0].is_over

    def take_signals(self, inbox: SignalInbox) -> None:
        """Handle what came since the last call."""
        for number in inbox.take():
            self._interrupt(number)

    def _interrupt(self, number: signal.Signals) -> None:
        """Pass a signal on to every host. A second one that ends gives the hosts no more time."""
        self._tell_all(signal_line(number))
        if number in PASSED_ON:
            return
        if self._signal is not None:
            self._give_up_after(_AFTERWARDS_S)
        self._signal = number
        self._is_ending = True
        self._give_up_after(self._spec.signal_timeout_s + _AFTERWARDS_S)

    def ended(self, connection: HostConnection, code: int) -> None:
        """A host's launcher has ended, or the connection to it has."""
        never_came = False
        if code == FAILED:
            never_came = self._lose(connection)
        elif code and self._first_code is None:
            self._first_code = code
        is_first = connection in self._hosts[: self._num_first]
        if code and (not self._goes_on_without(connection) or (never_came and is_first)):
            self._end_others(after_s=0.0 if never_came else self._notice_s)
        elif connection is self._hosts[0] and self.on_loss is not None:
            # One that is about to join would wait for it.
            self._end_others(after_s=self._notice_s)
        elif code and self.on_loss is not None and not self.is_ending:
            self.on_loss(connection)
        if all(host.is_over for host in self._hosts):
            self._loop.stop(self._exit_code())

    def _lose(self, connection: HostConnection) -> bool:
        """Name a host whose connection failed; whether it was never entered, so that the job cannot have begun."""
        if self._is_ending and self._signal is not None:
            return False
        failure = explain_failure(connection.host, list(connection.last_lines))
        self._output.warn(f"the host {connection.host.target} is lost: {failure.said}\n  hint: {failure.hint}")
        self._first_code = self._first_code or 1
        return failure.is_before_entry

    def _goes_on_without(self, connection: HostConnection) -> bool:
        """An elastic job outlives every host but the one that leads."""
        return self._spec.elastic is not None and connection is not self._hosts[0]

    @property
    def _notice_s(self) -> float:
        """How long launchers of a running job may take to notice a loss, report it and end."""
        return self._spec.shutdown_timeout_s + self._spec.heartbeat_timeout_s

    def _end_others(self, *, after_s: float) -> None:
        """The job cannot go on. A launcher that still waits for others does not notice, so it is told."""
        if self._is_ending:
            return
        self._is_ending = True
        self._loop.call_later(after_s, lambda: self._tell_all(signal_line(signal.SIGTERM)))
        self._give_up_after(after_s + self._notice_s + _AFTERWARDS_S)

    def _give_up_after(self, limit_s: float) -> None:
        self._loop.call_later(limit_s, self._give_up)

    def _give_up(self) -> None:
        silent = [host for host in self._hosts if not host.is_over]
        if not silent:
            return
        names = ", ".join(host.host.target for host in silent)
        self._output.warn(f"{names} did not end in time; the connection is closed, which ends what runs there")
        self._loop.stop(self._exit_code())

    def _tell_all(self, line: bytes) -> None:
        for host in self._hosts:
            host.tell(line)

    def _exit_code(self) -> int:
        """Node 0's, unless another host failed first for a reason of its own."""
        leader = self._hosts[0].exit_code
        if self._signal is not None:
            return 128 + self._signal if leader in (None, FAILED) else int(leader or 0)
        if self._first_code is not None and (self.on_loss is None or leader in (None, FAILED)):
            return self._first_code
        return 1 if leader is None else leader

    def __enter__(self) -> RemoteJob:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()


def describe_remote_job(
    spec: JobSpec, hosts: Sequence[RemoteHost], *, client: SshClient, directory: Path, variables: Mapping[str, str]
) -> list[str]:
    """What `launch_over_ssh` would do, line by line; nobody is asked. No value of a variable is shown."""
    import shlex

    from torsh_distributed.launch.entry import command_line

    lines = [f"{len(hosts)} hosts with {spec.world_size} workers, run {spec.run_id}, in {directory}"]
    lines += [f"carried variables: {', '.join(sorted(variables)) or 'none'}"]
    for node_rank, host in enumerate(hosts):
        first = sum(spec.workers_on(node) for node in range(node_rank))
        ranks = f"ranks {first} to {first + spec.workers_on(node_rank) - 1}"
        lines += [f"node {node_rank}, {ranks}: {shlex.join(client.command(host))}"]
    return [*lines, f"every rank: {shlex.join(command_line(spec.entry))}"]
