"""A network on one machine: hosts are network namespaces, joined by links that can be limited, cut and measured.

::

    host 0 (eth0) ──veth── port0 ┐
    host 1 (eth0) ──veth── port1 ┼ bridge    all of it inside namespaces of this lab alone
    host 2 (eth0) ──veth── port2 ┘

The bridge has its own namespace, so the machine's interfaces, routes and addresses are never touched and no packet
can leave. Each host has a name (node0, node1, …) and knows those of the others. Names of namespaces contain the
owner's pid and start time: parallel test processes do not collide, and the next one removes what a killed one left
behind. Needs root and iproute2.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.lab.enter import HOSTS_DIR, NETNS_DIR, Place

MAX_HOSTS = 16
_PREFIX = "torsh-lab"
_COMMAND_TIMEOUT_S = 20.0
_numbers = itertools.count()
# Runs as `sh -c _SET_NAME name command…` in its own UTS namespace; the process keeps its pid.
_SET_NAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


class LabError(RuntimeError):
    """A command that configures the lab failed; the message shows it with its output."""


@dataclass(frozen=True)
class Counters:
    """Traffic over a host's link so far, as the kernel counts it on the host's side.

    Ethernet headers are included, once per packet handed to the link: with segmentation offload a packet may
    have up to 64 KiB, so bulk transfers show fewer header bytes than a cable would.
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            tx_bytes=self.tx_bytes - earlier.tx_bytes,
            rx_bytes=self.rx_bytes - earlier.rx_bytes,
            tx_packets=self.tx_packets - earlier.tx_packets,
            rx_packets=self.rx_packets - earlier.rx_packets,
        )


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _shape(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode:
        shown = " ".join(command) + (f"\n{stdin}" if stdin else "")
        raise LabError(f"`{shown}` exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _ip_batch(namespace: str, *commands: str) -> None:
    _shape("ip", "-n", namespace, "-batch", "-", stdin="\n".join(commands) + "\n")


def _link(namespace: str, device: str) -> dict[str, Any]:
    (link,) = json.loads(_shape("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device))
    return dict(link)


def _address(index: int) -> str:
    return f"10.111.0.{index + 1}"


def _write_hosts_file(namespace: str) -> None:
    """Write the file that replaces /etc/hosts in the namespace, where `ip netns exec` looks for it."""
    lines = ["127.0.0.1 localhost", *(f"{_address(index)} node{index}" for index in range(MAX_HOSTS))]
    folder = HOSTS_DIR / namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _add_namespace(name: str) -> None:
    _shape("ip", "netns", "add", name)
    # IPv6 neighbour discovery and multicast reports would add to the counters of an idle link.
    switch = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
    _shape("ip", "netns", "exec", name, "sh", "-c", f"[ ! -e {switch} ] || echo 1 > {switch}")


def _remove_namespace(name: str) -> None:
    """Kill what runs in the namespace and delete it, if it exists."""
    shutil.rmtree(HOSTS_DIR / name, ignore_errors=True)
    if not (NETNS_DIR / name).exists():
        return
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    for pid in map(int, found.stdout.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    gone = subprocess.run(["ip", "netns", "delete", name], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if gone.returncode and (NETNS_DIR / name).exists():
        raise LabError(f"namespace {name} cannot be deleted: {gone.stderr.strip()}")


def leftovers() -> list[str]:
    """Namespaces of labs whose process is gone."""
    found = []
    for path in [*NETNS_DIR.glob(f"{_PREFIX}-*"), *HOSTS_DIR.glob(f"{_PREFIX}-*")]:
        pid, ticks = map(int, path.name.split("-")[2:4])
        if _start_ticks(pid) != ticks:
            found.append(path.name)
    return found


def remove_leftovers() -> None:
    """Remove what labs of killed processes left behind, including running processes."""
    for name in leftovers():
        _remove_namespace(name)


class Host:
    """One machine of the lab: its own interfaces, addresses, routes and name; files and processes are shared."""

    interface = "eth0"

    def __init__(self, index: int, *, namespace: str, switch: str) -> None:
        self.index = index
        self.namespace = namespace
        self.name = f"node{index}"
        self.address = _address(index)
        self._switch = switch
        self._port = f"port{index}"
        self._processes: list[subprocess.Popen[str]] = []
        self._is_limited = False
        _add_namespace(namespace)
        _write_hosts_file(namespace)
        _ip_batch(
            switch,
            f"link add {self._port} type veth peer name {self.interface} netns {namespace}",
            f"link set {self._port} master bridge0 up",
        )
        _ip_batch(
            namespace,
            "link set lo up",
            f"address add {self.address}/24 dev {self.interface}",
            f"link set {self.interface} up",
        )
        self._await_carrier()

    def _await_carrier(self, *ends: tuple[str, str]) -> None:
        """Wait until the link is up: the kernel takes up to a second, and silently drops packets until then."""
        deadline = time.monotonic() + _COMMAND_TIMEOUT_S
        ends = ends or ((self.namespace, self.interface), (self._switch, self._port))
        while not all(_link(*end)["operstate"] == "UP" for end in ends):
            if time.monotonic() > deadline:
                raise LabError(f"host {self.index}: no carrier after {_COMMAND_TIMEOUT_S} s")
            time.sleep(0.01)

    @property
    def place(self) -> Place:
        """What a forked process needs to know to enter this host."""
        return Place(self.namespace, self.name, self.address, self.interface)

    def popen(
        self, args: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on this host; `env` is added to this process's, other options are subprocess.Popen's.

        It uses text mode and has its own session. Processes still running when the lab closes are killed.
        """
        process: subprocess.Popen[str] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _SET_NAME, self.name, *args],
            env={**os.environ, **(env or {})},
            **{"text": True, "start_new_session": True, **options},
        )
        self._processes.append(process)
        return process

    def run(
        self, args: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 30.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a process on this host to its end; with `check`, a non-zero exit raises LabError with its output."""
        process = self.popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if check and process.returncode:
            raise LabError(
                f"`{' '.join(args)}` on host {self.index} exited with {process.returncode}:\n{stdout}{stderr}"
            )
        return subprocess.CompletedProcess(list(args), process.returncode, stdout, stderr)

    def limit(self, rate_gbps: float | None) -> None:
        """Limit the link to `rate_gbps` (10**9 bit/s) in each direction; None lifts the limit.

        A token bucket on both ends: bursts of 2 ms (at least 32 KiB) pass at once, 50 ms of traffic
        are queued, the rest is dropped as by a full switch, and TCP adapts.
        """
        for namespace, device in ((self.namespace, self.interface), (self._switch, self._port)):
            if rate_gbps is None:
                if self._is_limited:
                    _shape("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
                continue
            burst_bytes = max(32 * 1024, int(rate_gbps * 1e9 / 8 * 0.002))
            shape = ("rate", f"{int(rate_gbps * 1e9)}bit", "burst", str(burst_bytes), "latency", "50ms")
            _shape("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)
        self._is_limited = rate_gbps is not None

    def link_down(self) -> None:
        """Pull the cable: packets are lost in both directions, connections stay open and get no error."""
        _shape("ip", "-n", self._switch, "link", "set", self._port, "down")

    def link_up(self) -> None:
        """Plug the cable back in; returns when packets pass again."""
        _shape("ip", "-n", self._switch, "link", "set", self._port, "up")
        self._await_carrier()

    def counters(self) -> Counters:
        """Bytes and packets over the link since the host was made; subtract two for an interval."""
        stats = _link(self.namespace, self.interface)["stats64"]
        sent, received = stats["tx"], stats["rx"]
        return Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])

    def name_means(self, address: str, *names: str) -> None:
        """Have this host look up `names`, or its own name, as `address`: Debian gives a host's own name 127.0.1.1."""
        file = HOSTS_DIR / self.namespace / "hosts"
        lines = [line for line in file.read_text().splitlines() if line.split()[1] not in (names or (self.name,))]
        file.write_text("\n".join([*lines, *(f"{address} {name}" for name in names or (self.name,))]) + "\n")

    def add_interface(self, interface: str, address: str) -> None:
        """Give the host a second cable to the switch, with an address on another network."""
        port = f"port{self.index}{interface}"
        _ip_batch(
            self._switch,
            f"link add {port} type veth peer name {interface} netns {self.namespace}",
            f"link set {port} master bridge0 up",
        )
        _ip_batch(self.namespace, f"address add {address}/24 dev {interface}", f"link set {interface} up")
        self._await_carrier((self.namespace, interface), (self._switch, port))

    def use_ipv6_only(self) -> None:
        """Replace the host's address by one of IPv6, which its name means for every host that calls this."""
        self.address = f"fd00:111::{self.index + 1}"
        for switch in ("all", "default", self.interface, "lo"):
            knob = f"/proc/sys/net/ipv6/conf/{switch}/disable_ipv6"
            _shape("ip", "netns", "exec", self.namespace, "sh", "-c", f"echo 0 > {knob}")
        _ip_batch(
            self.namespace,
            f"address flush dev {self.interface}",
            f"address add {self.address}/64 dev {self.interface} nodad",
        )
        for index in range(MAX_HOSTS):
            self.name_means(f"fd00:111::{index + 1}", f"node{index}")

    def connect_to(self, bridge: str) -> None:
        """Move the cable to another bridge of the switch; `Lab.partition` is the usual way."""
        _shape("ip", "-n", self._switch, "link", "set", self._port, "master", bridge)

    def reap(self) -> None:
        """Reap the processes started here, which the lab has killed, and close their pipes."""
        for process in self._processes:
            process.kill()
            process.wait(timeout=10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


class Lab:
    """Hosts on one switch. `lab.host(i)` makes host i on first use."""

    def __init__(self) -> None:
        remove_leftovers()
        self._name = f"{_PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._hosts: dict[int, Host] = {}
        self._num_bridges = 0
        try:
            _add_namespace(self._switch)
            self._add_bridge()
        except BaseException:
            self.close()
            raise

    def _add_bridge(self) -> None:
        name = f"bridge{self._num_bridges}"
        _ip_batch(self._switch, f"link add {name} type bridge mcast_snooping 0", f"link set {name} up")
        self._num_bridges += 1

    def host(self, index: int) -> Host:
        """Host `index`, from 0 to MAX_HOSTS - 1."""
        if not 0 <= index < MAX_HOSTS:
            raise LabError(f"a lab has hosts 0 to {MAX_HOSTS - 1}, not {index}")
        if index not in self._hosts:
            self._hosts[index] = Host(index, namespace=f"{self._name}-host{index}", switch=self._switch)
        return self._hosts[index]

    def hosts(self, num_hosts: int) -> list[Host]:
        """The first `num_hosts` hosts."""
        return [self.host(index) for index in range(num_hosts)]

    def partition(self, *sides: Sequence[Host]) -> None:
        """Split the network: hosts reach only hosts of their own side.

        Unlike with `link_down`, every host keeps its carrier, as when a trunk between two switches breaks.
        Hosts that are not named stay with the first side.
        """
        for number, side in enumerate(sides):
            if number >= self._num_bridges:
                self._add_bridge()
            for host in side:
                host.connect_to(f"bridge{number}")

    def heal(self) -> None:
        """Undo `partition`."""
        self.partition(list(self._hosts.values()))

    def close(self) -> None:
        """Kill what runs in the lab and remove it; nothing of it stays in the kernel."""
        for path in NETNS_DIR.glob(f"{self._name}-*"):
            _remove_namespace(path.name)
        for host in self._hosts.values():
            host.reap()
        self._hosts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
