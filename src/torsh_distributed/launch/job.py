"""`launch_job`: start a job on this node, supervise it to its end, return its exit code."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from torsh_distributed.comm.meeting.network_interface import interface_between_nodes
from torsh_distributed.comm.trust.job_secret import new_secret
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.launch.control.host_discovery import is_this_machine
from torsh_distributed.launch.control.job_commands import JobCommands, RunningJob
from torsh_distributed.launch.entry import check_entry, command_line
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.guardian import MARK_VARIABLE
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.output import LineSplitter
from torsh_distributed.launch.local.signals import SCALING, SignalInbox
from torsh_distributed.launch.local.terminal import Terminal
from torsh_distributed.launch.local.worker_variables import AttemptEndpoint, worker_environment
from torsh_distributed.launch.nodes.elastic_leader import ElasticLeader
from torsh_distributed.launch.nodes.leader import Leader
from torsh_distributed.launch.nodes.listening_sockets import with_reachable_master
from torsh_distributed.launch.nodes.node import Node
from torsh_distributed.launch.nodes.records import FromLeader, JoinAccepted
from torsh_distributed.launch.ports import require_port_limit
from torsh_distributed.launch.spec import DiscoverySpec, ElasticSpec, JobSpec

if TYPE_CHECKING:
    from torsh_distributed.launch.control.host_discovery import HostWatch
    from torsh_distributed.launch.observing.spot_notice import SpotWatch

_CHOSEN_AT_START = (MARK_VARIABLE, "TORSH_SECRET_FILE", "TORSH_PROGRESS_FILE", "TORSH_STORE", "PYTHONPATH")

_READ_BYTES = 1 << 16


def launch_job(spec: JobSpec, *, offers: int | None = None) -> int:
    """Run the job described by `spec`; blocks until it ends. Called once on every node.

    `offers`: a descriptor with lines of JSON that say how many workers each node takes, where another process asks a
    host discovery script.

    Returns 0 if every worker succeeded, otherwise the exit code of the first that failed (128 + signal for a signal).
    Raises a TorshError if the job cannot start. Either way nothing is left running. Called from the main thread, it
    handles signals while it runs.
    """
    check_entry(spec.entry)
    if spec.port_range is not None:
        require_port_limit()
    spec = with_reachable_master(spec)
    with ExitStack() as stack:
        events_dir = os.environ.get("TORSH_EVENTS_DIR")
        if events_dir:
            from torsh_distributed.events import JsonlSink

            stack.enter_context(JsonlSink(events_dir))
        inbox = stack.enter_context(SignalInbox(can_scale=spec.elastic is not None and spec.is_leader))
        loop = stack.enter_context(Loop())
        terminal = stack.enter_context(Terminal())
        output = LauncherOutput(terminal, is_json=spec.is_json, is_raw=spec.is_raw)
        token = _choose_token(spec, output)
        node = stack.enter_context(Node(spec, loop, terminal, output, mark=secrets.token_hex(8), token=token))
        spec = node.spec
        loop.watch(inbox.fd, lambda: _take_signals(inbox, node, leader))
        if spec.health is not None:
            from torsh_distributed.launch.control.health_endpoint import HealthEndpoint

            stack.enter_context(HealthEndpoint(loop, *spec.health, node.count_workers))
        if spec.spot_notice is not None:
            stack.enter_context(_watch_for_notice(spec.spot_notice, loop, output, node))
        leader: Leader | None = None
        if spec.is_leader:
            log_name = f"{spec.run_id}-{time.strftime('%Y%m%d-%H%M%S')}"
            leader = stack.enter_context(_lead(spec, loop, output, token=token, directory=node.directory))
            leader.on_measured = node.take_measured
            if spec.spans_nodes:
                from torsh_distributed.launch.nodes.launcher_listener import LauncherListener

                stack.enter_context(LauncherListener(spec, loop, output, leader, token=token, log_name=log_name))
            stack.enter_context(_open_to_commands(spec, loop, leader))
            if isinstance(leader, ElasticLeader):
                output.say(_how_to_scale(spec, leader.elastic))
                if offers is not None:
                    _follow_offers(offers, loop, leader)
                elif leader.elastic.discovery is not None:
                    stack.enter_context(_follow_hosts(leader.elastic.discovery, loop, output, leader))
            node.handle(JoinAccepted(log_name=log_name))
            _connect(leader, node, loop)
        else:
            from torsh_distributed.launch.nodes.follower import Follower

            stack.enter_context(Follower(spec, loop, output, node, token=token))
        return loop.run()


def _lead(spec: JobSpec, loop: Loop, output: LauncherOutput, *, token: str, directory: Path) -> Leader:
    if spec.elastic is None:
        return Leader(spec, loop, output, token=token, directory=directory)
    return ElasticLeader(spec, spec.elastic, loop, output, token=token, directory=directory)


def _watch_for_notice(cloud: str, loop: Loop, output: LauncherOutput, node: Node) -> SpotWatch:
    """End the job as a batch system would when the cloud takes this machine back."""
    from torsh_distributed.launch.observing.spot_notice import SpotWatch, parse_cloud

    watch = SpotWatch(parse_cloud(cloud))

    def hear() -> None:
        said = watch.take()
        if said is not None:
            output.warn(said[1])
            if said[0]:
                node.interrupt(signal.SIGTERM)

    loop.watch(watch.reports.fileno(), hear)
    return watch


def _how_to_scale(spec: JobSpec, elastic: ElasticSpec) -> str:
    name = os.getpid() if spec.run_id == "none" else spec.run_id
    how = f"change that with `torsh scale {name} N`"
    if elastic.discovery is not None:
        how = f"their number follows {elastic.discovery.command[0]}"
    return f"elastic job of {spec.world_size} workers: {how}"


def _follow_hosts(discovery: DiscoverySpec, loop: Loop, output: LauncherOutput, leader: ElasticLeader) -> HostWatch:
    """Let the job have the workers for which a script says that this machine has slots."""
    from torsh_distributed.launch.control.host_discovery import HostWatch

    watch = HostWatch(discovery)
    known: dict[str, bool] = {}

    def is_here(host: str) -> bool:
        if host not in known:
            known[host] = is_this_machine(host)
            if not known[host]:
                output.warn(
                    f"the host {host} is left out: the job was started on this machine alone\n  hint: a job whose "
                    "first answer of the host discovery script names another machine is started over SSH"
                )
        return known[host]

    def hear() -> None:
        for report in watch.take():
            if report.hosts is None:
                output.warn(f"{report.problem}\n  its last answer stays in force")
            else:
                leader.offer({0: sum(count for host, count in report.hosts.items() if is_here(host))})

    loop.watch(watch.fd, hear)
    return watch


def _follow_offers(fd: int, loop: Loop, leader: ElasticLeader) -> None:
    """Let the job have the workers for which slots are offered, by a process that knows the hosts."""
    lines = LineSplitter()
    os.set_blocking(fd, False)

    def hear() -> None:
        data = os.read(fd, _READ_BYTES)
        if not data:
            loop.unwatch(fd)
        for line in lines.feed(data):
            leader.offer({int(node): int(count) for node, count in json.loads(line).items()})

    loop.watch(fd, hear)


def _open_to_commands(spec: JobSpec, loop: Loop, leader: Leader) -> JobCommands:
    """Let `torsh doctor` ask what the job is doing, and `torsh scale` change its workers."""
    job = RunningJob(
        pid=os.getpid(),
        run_id=spec.run_id,
        num_ranks=spec.world_size,
        node_rank=spec.node_rank,
        command=shlex.join(command_line(spec.entry)),
    )
    return JobCommands(
        loop,
        job,
        {
            "diagnosis": lambda _, reply: leader.diagnose(lambda found: reply(found.to_dict())),
            "scale": lambda arguments, reply: reply(leader.scale(arguments.get("workers"))),
        },
    )


def _choose_token(spec: JobSpec, output: LauncherOutput) -> str:
    """The job's secret: the user's, or a random one; several nodes without one must be asked for or on one machine."""
    if spec.serves_torch_store:
        output.warn(
            f"--torch-store: torch's store asks for no secret; whoever reaches {spec.master_addr} can read and write it"
        )
    if spec.token is not None:
        return spec.token
    if not spec.spans_nodes:
        return new_secret()
    if not spec.allows_no_token:
        raise ConfigurationError(
            "a job on several nodes needs a secret that all of them have",
            hint="give every node the same --token-file (created if it is missing) or TORSH_JOB_TOKEN; "
            "--no-token runs without, on a network where everyone may join the job",
            nnodes=spec.nnodes,
            master_addr=spec.master_addr,
        )
    output.warn("--no-token: anyone who reaches the master port can join, read and end this job")
    return hashlib.sha256(f"torsh run {spec.run_id}".encode()).hexdigest()


def describe_job(spec: JobSpec) -> list[str]:
    """What `launch_job` would start on this node, line by line; nothing is opened or started."""
    port = spec.master_port if spec.nnodes == 1 and spec.master_port else 0
    interface = interface_between_nodes(spec.master_addr, num_nodes=spec.nnodes)
    endpoint = AttemptEndpoint(attempt=0, master_addr=spec.master_addr, master_port=port, interface=interface)
    workers = f"{spec.workers_on(spec.node_rank)} of {spec.world_size} workers"
    lines = [
        f"node {spec.node_rank} of {spec.nnodes}: {workers}, up to {spec.max_restarts} restarts, run {spec.run_id}"
    ]
    for place in spec.places():
        env = worker_environment(spec, place, endpoint, base={}, mark="", secret_file=Path(), progress_file=Path())
        shown = {name: value for name, value in env.items() if name not in _CHOSEN_AT_START}
        if not port:
            shown["MASTER_PORT"] = "a free port"
        lines.append(f"rank {place.rank}: {shlex.join(command_line(spec.entry))}")
        lines += [f"    {name}={shlex.quote(value)}" for name, value in sorted(shown.items())]
    return lines


def _take_signals(inbox: SignalInbox, node: Node, leader: Leader | None) -> None:
    for number in inbox.take():
        if number in SCALING and leader is not None:
            leader.scale_by(SCALING[number])
        else:
            node.interrupt(number)


def _connect(leader: Leader, node: Node, loop: Loop) -> None:
    """Connect the leader and the node of this process; records pass through the loop, as from another node."""

    def send(message: FromLeader) -> None:
        loop.call_later(0, lambda: node.handle(message))

    node.report = lambda message: leader.receive(0, message)
    leader.join(0, send)
