"""Hosts that a discovery script names while a job over SSH runs: entered when they come, and left out when they go.

This process asks the script, as `horovodrun` does. It starts a launcher on every host that is new and tells the one
that leads how many workers each takes; that one lets them come and go. A launcher whose host is not named any more
stays, without workers, until the job ends or the host does.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Self

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.control.host_discovery import LOOPBACK_NAMES, HostWatch
from torsh_distributed.launch.control.slot_policy import Blacklist
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.spec import DiscoverySpec
from torsh_distributed.launch.ssh.host_connection import HostConnection
from torsh_distributed.launch.ssh.host_order import HostOrder, offer_line
from torsh_distributed.launch.ssh.ssh_client import RemoteHost, parse_hosts


class FoundHosts:
    """The hosts of one job by name. Node ranks are not used again: a host that comes back is another node."""

    def __init__(
        self,
        discovery: DiscoverySpec,
        loop: Loop,
        output: LauncherOutput,
        first_order: HostOrder,
        enter: Callable[[RemoteHost, HostOrder], HostConnection],
        connections: Sequence[HostConnection],
        is_ending: Callable[[], bool],
    ) -> None:
        """`connections`: to the hosts with which the job starts, by node rank; the first one leads."""
        self._loop = loop
        self._output = output
        self._is_ending = is_ending
        self._first_order = first_order
        self._enter = enter
        self._leader = connections[0]
        self._node_of = {connection.host.target: node for node, connection in enumerate(connections)}
        self._next_node = len(connections)
        self._slots: dict[str, int] = {}
        self._failed: Blacklist[str] = Blacklist(discovery.cooldown_s)
        self._refused: set[str] = set()
        self._timer: Timer | None = None
        self._watch = HostWatch(discovery)
        loop.watch(self._watch.fd, self._hear)

    def _hear(self) -> None:
        for report in self._watch.take():
            if report.hosts is None:
                self._output.warn(f"{report.problem}\n  its last answer stays in force")
            else:
                self._slots = report.hosts
                self._follow()

    def _follow(self) -> None:
        """Enter the hosts that are new, and tell the leader what there is."""
        if self._is_ending():
            return
        now_s = time.monotonic()
        for host, count in self._slots.items():
            if count and host not in self._node_of and self._is_usable(host) and not self._failed.has(host, now_s):
                self._add(host)
        offered = {node: self._slots.get(host, 0) for host, node in self._node_of.items()}
        self._leader.tell(offer_line(offered))
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._failed.next_end_s(now_s)
        if next_s is not None:
            self._timer = self._loop.call_later(next_s - now_s, self._follow)

    def _is_usable(self, host: str) -> bool:
        if host in LOOPBACK_NAMES:
            problem = f"on the other hosts {host} means another machine; print the name by which they reach it"
        else:
            try:
                parse_hosts(host)
            except InvalidArgument as error:
                problem = error.message
            else:
                return True
        if host not in self._refused:
            self._refused.add(host)
            self._output.warn(f"the host {host} is left out: {problem}")
        return False

    def _add(self, host: str) -> None:
        node = self._next_node
        self._next_node += 1
        spec = self._first_order.spec
        counts = (*spec.workers_by_node, *(0 for _ in range(len(spec.workers_by_node), node + 1)))
        order = dataclasses.replace(
            self._first_order,
            spec=dataclasses.replace(spec, node_rank=node, nnodes=node + 1, workers_by_node=counts),
        )
        self._output.say(f"the host {host} is new: it becomes node {node}")
        self._node_of[host] = node
        (remote,) = parse_hosts(host)
        self._enter(remote, order)

    def lose(self, connection: HostConnection) -> None:
        """A host is gone, or could not be entered: it is not entered again for a while, or at all."""
        host = connection.host.target
        self._node_of.pop(host, None)
        delay_s = self._failed.add(host, time.monotonic())
        until = "any more" if delay_s == math.inf else f"for {delay_s:.1f} s"
        self._output.say(f"the host {host} is gone, and is not entered {until}")
        self._follow()

    def close(self) -> None:
        """Stop asking."""
        self._loop.unwatch(self._watch.fd)
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
