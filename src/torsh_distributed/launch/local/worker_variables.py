"""The environment of a worker: torchrun's variables and a few more. Pure; `worker.environment` reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.comm.meeting.network_interface import interface_variables
from torsh_distributed.comm.shared_memory.memory_file import KEPT_MEMORY_VARIABLE
from torsh_distributed.comm.trust.job_secret import STORE_VARIABLE, without_secrets
from torsh_distributed.comm.trust.job_tls import (
    AUTHORITY_VARIABLE,
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    plain_transports_off,
)
from torsh_distributed.launch.local.guardian import MARK_VARIABLE
from torsh_distributed.launch.ports import port_variables
from torsh_distributed.launch.spec import JobSpec, WorkerPlace
from torsh_distributed.launch.worker.launcher_line import (
    BEAT_VARIABLE,
    GREEN_VARIABLE,
    JOIN_VARIABLE,
    MEMBER_VARIABLE,
    METRICS_VARIABLE,
    NEWS_VARIABLE,
)

STARTUP_DIRECTORY = Path(__file__).parents[1] / "worker" / "startup"
"""On the workers' PYTHONPATH: its sitecustomize tells torch where the job's store is, also in scripts without us."""

_NEWS_S = 15.0
"""How long survivors wait for word about a loss, beyond what the launcher itself waits for."""

BEAT_S = 0.1
"""Seconds between beats of a worker, in an elastic job."""
SLOW_BEAT_S = 1.0
"""The same in a job whose world is fixed, where nobody is replaced."""

# Overrides for a process started by hand. Inherited, they would give every worker the same rank.
_PERSONAL = (
    "TORSH_RANK",
    "TORSH_WORLD_SIZE",
    "TORSH_LOCAL_RANK",
    "TORSH_NODE_ID",
    "TORSH_MASTER_ADDR",
    "TORSH_MASTER_PORT",
    # Of a job around this one.
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    AUTHORITY_VARIABLE,
    METRICS_VARIABLE,
    GREEN_VARIABLE,
    STORE_VARIABLE,
    MEMBER_VARIABLE,
    JOIN_VARIABLE,
    BEAT_VARIABLE,
    KEPT_MEMORY_VARIABLE,
    NEWS_VARIABLE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEndpoint:
    """Where the workers of one attempt meet: its number, its own store, and the interface on which they connect."""

    attempt: int
    master_addr: str
    master_port: int
    interface: str | None = None
    """The network interface that torch's backends are told to use; None leaves it to them."""
    machine_interval_s: float | None = None
    """Seconds between readings of the node's sensors, if the workers are to measure."""
    local_store: str = ""
    """Path of the store's Unix socket, for workers on its node."""

    @property
    def store_url(self) -> str:
        """Where a worker finds the store that asks for the job's secret."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"unix://{self.local_store}" if self.local_store else f"tcp://{host}:{self.master_port}"


def worker_environment(
    spec: JobSpec,
    place: WorkerPlace,
    endpoint: AttemptEndpoint,
    *,
    base: Mapping[str, str],
    mark: str,
    secret_file: Path,
    progress_file: Path,
    joins: bool = False,
) -> dict[str, str]:
    """Every variable of one worker. The job's values win over `base`, and `spec.env` over both.

    One that `joins` has a number beyond the world's: it starts alone, and learns its rank when it is let in.
    """
    env = {name: value for name, value in without_secrets(base).items() if name not in _PERSONAL}
    env.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.local_rank),
        WORLD_SIZE=str(max(spec.world_size, place.rank + 1)),
        LOCAL_WORLD_SIZE=str(max(spec.workers_on(place.node_rank), place.local_rank + 1)),
        GROUP_RANK=str(place.node_rank),
        GROUP_WORLD_SIZE=str(spec.nnodes),
        NODE_RANK=str(place.node_rank),
        ROLE_NAME=spec.role,
        ROLE_RANK=str(place.rank),
        ROLE_WORLD_SIZE=str(spec.world_size),
        MASTER_ADDR=endpoint.master_addr,
        MASTER_PORT=str(endpoint.master_port),
        TORCHELASTIC_RESTART_COUNT=str(endpoint.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(spec.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id,
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORSH_LAUNCHER="run",
        TORSH_PROGRESS_FILE=str(progress_file),
        TORSH_SECRET_FILE=str(secret_file),
        PYTHONPATH=os.pathsep.join(filter(None, (str(STARTUP_DIRECTORY), base.get("PYTHONPATH")))),
    )
    if spec.tls is not None:
        env.update(spec.tls.variables())
        if spec.spans_nodes:
            env.update(plain_transports_off(spec.tls))
    if spec.port_range is not None:
        env.update(port_variables(spec.port_range, base))
    if spec.elastic is not None:
        env.update({BEAT_VARIABLE: str(BEAT_S), MEMBER_VARIABLE: str(place.rank)})
        if spec.elastic.on_loss == "wait" or spec.elastic.min_workers > 1 or spec.elastic.discovery is not None:
            # Survivors may hear nothing until a replacement has come up, or a slot for one.
            env[NEWS_VARIABLE] = f"{spec.elastic.wait_timeout_s + _NEWS_S:g}"
    else:
        env[BEAT_VARIABLE] = str(SLOW_BEAT_S)
    if joins:
        env[JOIN_VARIABLE] = "1"
    if not spec.serves_torch_store:
        env[STORE_VARIABLE] = endpoint.store_url
    if endpoint.machine_interval_s is not None:
        env[METRICS_VARIABLE] = f"{endpoint.machine_interval_s:g}"
    if spec.green is not None:
        env[GREEN_VARIABLE] = "1"
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # torch's own flight recorder, for groups on gloo and nccl: the doctor reads it when ranks wait.
    env.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    for name, value in interface_variables(endpoint.interface).items():
        env.setdefault(name, value)
    if sets_omp_threads(spec, base):
        env["OMP_NUM_THREADS"] = "1"
    # A job started by a worker of another job carries both marks: ending the outer one ends the inner too.
    env[MARK_VARIABLE] = ":".join(filter(None, (base.get(MARK_VARIABLE), mark)))
    env.update(spec.env)
    return env


def sets_omp_threads(spec: JobSpec, base: Mapping[str, str]) -> bool:
    """Whether OMP_NUM_THREADS=1 is set, as torchrun does: several workers whose user chose no number of threads."""
    return spec.nproc_per_node > 1 and "OMP_NUM_THREADS" not in base and "OMP_NUM_THREADS" not in spec.env
