"""How many nodes and workers a job has, from the options that can say it: counts, hosts, a script, a plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torsh_distributed.cli.cluster.ssh_run import SshRun, ssh_hosts
from torsh_distributed.cli.run.discovered_job import are_here, discovery_spec, first_hosts
from torsh_distributed.cli.run.option_values import elastic_spec, planned_elastic, read_plan
from torsh_distributed.cli.run.options import ElasticOptions, NodeOptions, SshOptions, WorkerOptions
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec, parse_nnodes, parse_nproc

if TYPE_CHECKING:
    from torsh_distributed.plan import Plan


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """The nodes and workers with which a job starts, and whether they may change."""

    num_nodes: int
    num_workers: int
    """On each node; the most of them where `counts` differ."""
    counts: tuple[int, ...] = ()
    """On each node, where a script has said it."""
    remote: SshRun | None = None
    elastic: ElasticSpec | None = None
    plan: Plan | None = None


def job_size(workers: WorkerOptions, nodes: NodeOptions, ssh: SshOptions, changing: ElasticOptions) -> JobSize:
    """Read the options, and refuse those that contradict each other.

    Which hosts a script names is asked once all else is known to be right: it may wait for slots.
    """
    num_nodes, num_workers = parse_nnodes(nodes.nnodes), parse_nproc(workers.nproc_per_node)
    discovery = discovery_spec(
        changing.host_discovery_script, slots_per_host=changing.slots_per_host, cooldown=changing.host_cooldown
    )
    remote = ssh_hosts(ssh, nproc_per_node=num_workers) if discovery is None else None
    if remote is not None:
        if workers.mpi or num_nodes > 1 or nodes.node_rank:
            raise InvalidArgument(
                "--ssh takes nodes and their order from --hosts", hint="leave out --nnodes, --node-rank and --mpi"
            )
        num_nodes, num_workers = len(remote.hosts), remote.num_workers
    if nodes.standalone and num_nodes > 1:
        raise InvalidArgument("--standalone is for one node", hint="leave it out with --nnodes", nnodes=num_nodes)
    plan = read_plan(workers.plan, num_ranks=num_nodes * num_workers)
    elastic = elastic_spec(
        planned_elastic(plan),
        wanted=changing.elastic,
        min_workers=changing.min_workers,
        max_workers=changing.max_workers,
        on_loss=changing.on_loss,
        wait_timeout_s=changing.wait_timeout,
        discovery=discovery,
    )
    size = JobSize(num_nodes=num_nodes, num_workers=num_workers, remote=remote, elastic=elastic, plan=plan)
    if elastic is not None and elastic.discovery is not None:
        if workers.mpi or ssh.ssh or ssh.hosts or num_nodes > 1 or nodes.node_rank:
            raise InvalidArgument(
                "--host-discovery-script says the nodes of a job",
                hint="leave out --ssh, --hosts, --nnodes, --node-rank and --mpi",
            )
        size = _discovered(size, elastic, ssh)
    if workers.mpi and elastic is not None:
        raise InvalidArgument(
            "--mpi and --elastic exclude each other: an MPI job ends when a rank is lost", hint="leave out one of them"
        )
    if workers.mpi and nodes.tls:
        raise InvalidArgument("--mpi and --tls exclude each other: MPI has no encryption", hint="leave out one of them")
    return size


def _discovered(size: JobSize, elastic: ElasticSpec, ssh: SshOptions) -> JobSize:
    """The size that the hosts of a script give: on this machine, or over SSH."""
    assert elastic.discovery is not None, "asked for in a job with a script alone"
    found = first_hosts(elastic.discovery, elastic, size.num_workers)
    if are_here(found):
        return dataclasses.replace(size, num_workers=sum(found.values()))
    hosts = ",".join(f"{host}:{count}" for host, count in found.items())
    remote = ssh_hosts(ssh._replace(ssh=True, hosts=hosts), nproc_per_node=size.num_workers, may_differ=True)
    assert remote is not None, "it is wanted"
    return dataclasses.replace(
        size,
        num_nodes=len(remote.hosts),
        num_workers=remote.num_workers,
        counts=remote.counts,
        remote=remote,
    )
