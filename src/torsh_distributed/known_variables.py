"""Every environment variable that this library reads or sets: its type, its default and its meaning, in one table.

`torsh env` shows them, `torsh doctor` knows from here which names are misspelt or old, and the page of variables in the
reference is made of it. A test compares the table with the code. What has a default is read through `text`,
`whole_number`, `number` or `is_on`, so that the default is written here alone. TORSH_PLAN__SECTION__KEY is not listed:
the keys are those of the plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

from torsh_distributed.errors import ConfigurationError

Kind = Literal["text", "number", "seconds", "switch", "path", "address", "secret"]
DEFAULT_MASTER_PORT = 29500


class Variable(NamedTuple):
    """One variable. A default of "" means that being unset has a meaning of its own, which the text gives."""

    name: str
    kind: Kind
    meaning: str
    default: str = ""


SECTIONS: dict[str, tuple[Variable, ...]] = {
    "Settings of torsh-distributed": (
        Variable("TORSH_INIT_TIMEOUT", "seconds", "time for the ranks to meet; else the plan's distributed.timeout_s"),
        Variable("TORSH_LOG", "text", "level of the library's messages: DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        Variable("TORSH_DEBUG", "switch", "1 compares every collective between the ranks before it runs", "0"),
        Variable("TORSH_PLAN", "path", "plan file for Plan.from_env(os.environ) and `torsh run`; auto: it is chosen"),
        Variable("TORSH_EVENTS_DIR", "path", "directory for each process's events as JSON lines"),
        Variable("TORSH_EVENTS_MAX_MB", "number", "most megabytes of events per process; the oldest are dropped"),
        Variable("TORSH_BETWEEN_NODES", "text", "what carries data between nodes: gloo or mpi", "gloo"),
        Variable("TORSH_PORT_RANGE", "text", "FIRST-LAST: ports on which processes of the job listen"),
        Variable("TORSH_JOB_TOKEN", "secret", "the job's secret, the same on every node; `--token-file` is safer"),
        Variable("TORSH_STORE_TOKEN", "secret", "secret that clients of `torsh store serve` must know"),
        Variable("TORSH_SMTP_PASSWORD", "secret", "password of the mail server that sends alerts"),
        Variable("TORSH_ELECTRICITY_MAPS_TOKEN", "secret", "token for the feed of Electricity Maps"),
        Variable("TORSH_WATTTIME_USER", "text", "account for the feed of WattTime"),
        Variable("TORSH_WATTTIME_PASSWORD", "secret", "its password"),
        Variable("TORSH_TLS", "path", "`torsh run --tls`: directory of certificates; auto makes them for the job"),
        Variable("TORSH_STATE_DIR", "path", "records of jobs and of this machine; else torsh in XDG_STATE_HOME"),
        Variable("TORSH_METADATA_URL", "address", "the cloud's metadata service", "http://169.254.169.254"),
        Variable("TORSH_FAULTS", "text", "faults to inject, such as `kill rank 2 at step 5`; for tests of a job"),
        Variable("TORSH_FAULT_LOG", "path", "file that says when each injected fault happened"),
        Variable("TORSH_RANK", "number", "overrides the launcher's rank"),
        Variable("TORSH_WORLD_SIZE", "number", "overrides the launcher's world size"),
        Variable("TORSH_LOCAL_RANK", "number", "overrides the launcher's local rank"),
        Variable("TORSH_NODE_ID", "number", "overrides the launcher's node rank"),
        Variable("TORSH_MASTER_ADDR", "address", "overrides MASTER_ADDR"),
        Variable("TORSH_MASTER_PORT", "number", "overrides MASTER_PORT"),
    ),
    "Set by torsh-distributed for its processes": (
        Variable("TORSH_LAUNCHER", "text", "what started this worker: run, ray or dask"),
        Variable("TORSH_STORE", "address", "the store that `torsh run` serves to its workers"),
        Variable("TORSH_SECRET_FILE", "path", "file with the job's secret"),
        Variable("TORSH_TLS_CERT", "path", "this process's certificate, under TLS"),
        Variable("TORSH_TLS_KEY", "path", "the certificate's key"),
        Variable("TORSH_TLS_CA", "path", "the authority that signed the job's certificates"),
        Variable("TORSH_LINE_FD", "number", "descriptor of the worker's line to its launcher"),
        Variable("TORSH_AUTO_PLAN", "path", "where a chosen plan is kept, and read again after a restart"),
        Variable("TORSH_PROGRESS_FILE", "path", "where a worker notes its last step"),
        Variable("TORSH_METRICS", "seconds", "between readings of the node's sensors, if workers are to measure"),
        Variable("TORSH_GREEN", "switch", "the launcher reads the node's meters: workers need not"),
        Variable("TORSH_LOADER_WORKERS", "number", "workers for DataLoaders that a trial of `torsh tune` asks for"),
        Variable("TORSH_MEMBER", "number", "in an elastic job: the worker's number, kept while ranks change"),
        Variable("TORSH_JOINS", "switch", "the worker enters a world that trains already"),
        Variable("TORSH_BEAT_S", "seconds", "between the beats that the launcher expects; none without it"),
        Variable("TORSH_NEWS_TIMEOUT_S", "seconds", "a failed collective waits this long for the launcher", "15"),
        Variable("TORSH_KEPT_MEMORY", "path", "directory in shared memory for state that outlives a worker"),
        Variable("TORSH_RUN_AS", "text", "library whose place this one takes, of `torsh run --as`"),
        Variable("TORSH_DEEPSPEED_LOCAL_RANK", "switch", "the script expects --local_rank, as DeepSpeed passes it"),
        Variable("TORSH_STRICT_CONFIG", "switch", "1 refuses keys of a DeepSpeed config without effect (`--strict`)"),
        Variable("TORSH_JOB_MARKS", "text", "marks every process of a job, so that none outlives it"),
        Variable("TORSH_PMI_ADDRESS", "address", "where a worker of `torsh run --mpi` meets its MPI"),
        Variable("TORSH_REPORT_DIR", "path", "where a rank without a launcher writes what ended it"),
        Variable("TORSH_RESUME_FROM", "path", "checkpoint that a trial of Ray Tune goes on from"),
        Variable("TORSH_RAY_JOB", "text", "the job that a Ray driver is to run"),
        Variable("TORSH_DASK_JOB", "text", "the job that a Dask scheduler is to run"),
        Variable("TORSH_NODES", "number", "nodes of a job on Kubernetes"),
    ),
    "The place in the job": (
        Variable("RANK", "number", "this process among all", "0"),
        Variable("WORLD_SIZE", "number", "processes of the job", "1"),
        Variable("LOCAL_RANK", "number", "this process on its node; picks the GPU", "0"),
        Variable("LOCAL_WORLD_SIZE", "number", "processes of this node", "1"),
        Variable("NODE_RANK", "number", "this node among the job's"),
        Variable("GROUP_RANK", "number", "the same, as torchrun calls it"),
        Variable("GROUP_WORLD_SIZE", "number", "nodes of the job"),
        Variable("ROLE_NAME", "text", "torchrun's name for the workers"),
        Variable("ROLE_RANK", "number", "the rank, as torchrun calls it too"),
        Variable("ROLE_WORLD_SIZE", "number", "the world size, as torchrun calls it too"),
        Variable("MASTER_ADDR", "address", "the node of rank 0, where ranks meet", "127.0.0.1"),
        Variable("MASTER_PORT", "number", "the port on which they meet", str(DEFAULT_MASTER_PORT)),
        Variable("TORCHELASTIC_RUN_ID", "text", "name of the run; says that torchrun's variables are set"),
        Variable("TORCHELASTIC_RESTART_COUNT", "number", "how often the launcher has restarted the world", "0"),
        Variable("TORCHELASTIC_MAX_RESTARTS", "number", "how often it may", "0"),
        Variable("TORCHELASTIC_USE_AGENT_STORE", "text", "True if the launcher hosts the store"),
    ),
    "Batch systems and MPI": (
        Variable("SLURM_JOB_ID", "number", "the job; the port where ranks meet is made of it"),
        Variable("SLURM_STEP_ID", "number", "set by srun: this process is a task"),
        Variable("SLURM_PROCID", "number", "rank"),
        Variable("SLURM_NTASKS", "number", "world size"),
        Variable("SLURM_LOCALID", "number", "local rank"),
        Variable("SLURM_NODEID", "number", "node rank"),
        Variable("SLURM_STEP_NODELIST", "text", "nodes of the step; the first is the master"),
        Variable("SLURM_JOB_NODELIST", "text", "nodes of the job, where the step's are not given"),
        Variable("SLURM_STEP_TASKS_PER_NODE", "text", "ranks of each node"),
        Variable("SLURM_RESTART_COUNT", "number", "how often the job was requeued"),
        Variable("OMPI_COMM_WORLD_RANK", "number", "rank under Open MPI"),
        Variable("OMPI_COMM_WORLD_SIZE", "number", "world size under Open MPI"),
        Variable("OMPI_COMM_WORLD_LOCAL_RANK", "number", "local rank under Open MPI"),
        Variable("OMPI_COMM_WORLD_LOCAL_SIZE", "number", "ranks of this node under Open MPI"),
        Variable("PMI_RANK", "number", "rank under MPICH and Intel MPI"),
        Variable("PMI_SIZE", "number", "world size under MPICH and Intel MPI"),
        Variable("PMI_FD", "number", "descriptor of MPICH's process manager; `torsh run --mpi` sets it"),
        Variable("PMIX_RANK", "number", "rank under PMIx; says that MPI started the process"),
        Variable("MPI_LOCALRANKID", "number", "local rank under MPICH"),
        Variable("MPI_LOCALNRANKS", "number", "ranks of this node under MPICH"),
        Variable("MPI4PY_LIBMPI", "path", "the MPI library that mpi4py loads"),
        Variable("PBS_JOBID", "text", "the job; the port where ranks meet is made of it"),
        Variable("PBS_NODEFILE", "path", "a line for each rank: its host"),
        Variable("PBS_VNODENUM", "number", "rank under pbsdsh"),
        Variable("PBS_TASKNUM", "number", "above 1 under pbsdsh; 1 is the batch script"),
    ),
    "torchrun's defaults for `torsh run`": tuple(
        Variable(f"PET_{option}", "text", f"as --{option.lower().replace('_', '-')} of `torsh run`")
        for option in (
            *(
                "NPROC_PER_NODE",
                "NNODES",
                "NODE_RANK",
                "MAX_RESTARTS",
                "START_METHOD",
                "ROLE",
                "MASTER_ADDR",
                "MASTER_PORT",
            ),
            *("RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID", "LOG_DIR", "LOCAL_RANKS_FILTER", "SHUTDOWN_TIMEOUT"),
        )
    ),
    "Devices and networks": (
        Variable("CUDA_VISIBLE_DEVICES", "text", "GPUs that this process may use"),
        Variable("CUDA_LAUNCH_BLOCKING", "switch", "1 waits for every kernel; slow"),
        Variable("OMP_NUM_THREADS", "number", "threads of each process; workers that share a node get 1"),
        Variable("GLOO_SOCKET_IFNAME", "text", "interface of gloo; else loopback, or the one towards the master"),
        Variable("GLOO_DEVICE_TRANSPORT", "text", "TCP_TLS under TLS, so that plain gloo cannot start"),
        Variable("NCCL_SOCKET_IFNAME", "text", "interface of NCCL; between nodes, the one towards the master"),
        Variable("NCCL_NET", "text", "NCCL's network; set under TLS, so that plain NCCL cannot start"),
        Variable("NCCL_P2P_DISABLE", "switch", "1 makes GPUs exchange through host memory; slow"),
        Variable("NCCL_SHM_DISABLE", "switch", "1 makes processes of one node exchange over the network; slow"),
        Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "number", "1: a failed NCCL operation ends the process"),
        Variable("TORCH_NCCL_BLOCKING_WAIT", "switch", "torch's waits for NCCL block"),
        Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "switch", "torch writes its flight recorder when NCCL times out"),
        Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "seconds", "torch's watchdog of NCCL"),
        Variable("TORCH_FR_BUFFER_SIZE", "number", "operations that torch's flight recorder keeps"),
        Variable("TORCH_DISTRIBUTED_DEBUG", "text", "DETAIL makes torch check every collective; slow"),
    ),
    "Clusters": (
        Variable("RAY_ADDRESS", "address", "the Ray cluster"),
        Variable("RAY_AUTH_MODE", "text", "how Ray's clients prove who they are"),
        Variable("RAY_AUTH_TOKEN", "secret", "the token of a Ray cluster"),
        Variable("RAY_AUTH_TOKEN_PATH", "path", "file with that token"),
        Variable("RAY_JOB_CONFIG_JSON_ENV_VAR", "text", "Ray's description of the job that a driver belongs to"),
        Variable("RAY_USAGE_STATS_ENABLED", "switch", "off for clusters that this library starts"),
        Variable("KUBECONFIG", "path", "how to reach the Kubernetes cluster"),
        Variable("KUBERNETES_SERVICE_HOST", "address", "set in pods: the cluster's server"),
        Variable("KUBERNETES_SERVICE_PORT", "number", "its port", "443"),
        Variable("KUBERNETES_EXEC_INFO", "text", "what a program of a kubeconfig is told"),
        Variable("POD_IP", "address", "set in pods that this library makes"),
        Variable("AWS_DEFAULT_REGION", "text", "region of rendered AWS scripts"),
    ),
    "Other libraries' scripts": (
        Variable(
            "HOROVOD_FUSION_THRESHOLD", "number", "most bytes of all-reduces that share a buffer", str(128 * 2**20)
        ),
        Variable("HOROVOD_CYCLE_TIME", "number", "milliseconds that small operations wait for others", "1"),
        Variable("HOROVOD_CACHE_CAPACITY", "number", "repeated operations that travel as a number", "1024"),
        Variable("HOROVOD_STALL_CHECK_DISABLE", "switch", "1 reports no stalled operations", "0"),
        Variable("HOROVOD_STALL_CHECK_TIME_SECONDS", "seconds", "until a stalled operation is reported", "60"),
        Variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "seconds", "until it fails on all ranks; 0 never", "3600"),
        Variable("HOROVOD_DYNAMIC_PROCESS_SETS", "switch", "1 allows process sets after init", "0"),
        Variable("HOROVOD_TIMELINE", "path", "file for Horovod's timeline"),
        Variable("HOROVOD_TIMELINE_MARK_CYCLES", "switch", "1 marks the cycles in it", "0"),
        Variable("HOROVOD_ELASTIC", "switch", "1 in elastic jobs", "0"),
        Variable("HOROVOD_RESET_LIMIT", "number", "most resets of an elastic job"),
        Variable("HOROVOD_HOSTNAME", "text", "set for scripts: this host"),
        Variable("HOROVOD_RANK", "number", "set for scripts: RANK"),
        Variable("HOROVOD_SIZE", "number", "set for scripts: WORLD_SIZE"),
        Variable("HOROVOD_LOCAL_RANK", "number", "set for scripts: LOCAL_RANK"),
        Variable("HOROVOD_LOCAL_SIZE", "number", "set for scripts: LOCAL_WORLD_SIZE"),
        Variable("HOROVOD_CROSS_RANK", "number", "set for scripts: GROUP_RANK"),
        Variable("HOROVOD_CROSS_SIZE", "number", "set for scripts: GROUP_WORLD_SIZE"),
        Variable("DEEPSPEED_TIMEOUT", "number", "minutes for the ranks to meet"),
        Variable("DEEPSPEED_ELASTICITY_CONFIG", "text", "the elasticity section that a scheduler used, as JSON"),
        Variable("LOCAL_SIZE", "number", "processes of this node, as DeepSpeed reads it", "0"),
        Variable("WANDB_ENTITY", "text", "where Weights & Biases puts a run of a DeepSpeed config"),
        Variable("WANDB_RUN_GROUP", "text", "its group there"),
    ),
    "The machine": (
        Variable("CC", "text", "C compiler that builds the library's native parts"),
        Variable("CXX", "text", "C++ compiler that torch.compile uses"),
        Variable("HOME", "path", "home directory; where a kubeconfig is looked for", "/"),
        Variable("LD_PRELOAD", "text", "gets the library that keeps sockets in a range of ports"),
        Variable("NO_COLOR", "switch", "output without colours"),
        Variable("PYTHONPATH", "text", "where Python looks for modules; workers get one folder more"),
        Variable("PYTHONSAFEPATH", "switch", "the current directory is not searched for modules"),
        Variable("PYTHONUNBUFFERED", "switch", "1 in pods, so that logs come at once"),
        Variable("TERM", "text", "kind of terminal; none without colours is `dumb`"),
        Variable("TORCHINDUCTOR_CACHE_DIR", "path", "where torch.compile keeps what it compiled"),
        Variable("XDG_CACHE_HOME", "path", "caches; else ~/.cache"),
        Variable("XDG_STATE_HOME", "path", "state; else ~/.local/state"),
    ),
}

KNOWN: dict[str, Variable] = {one.name: one for section in SECTIONS.values() for one in section}

RENAMED: dict[str, str] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
}
"""Old names that NCCL or torch still read today, and the new ones."""

REMOVED: dict[str, str] = {
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_POINTERS",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_RINGS": "NCCL_GRAPH_FILE",
    "NCCL_SINGLE_RING_THRESHOLD": "NCCL_ALGO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
}
"""Names that NCCL reads no longer, and what took their place. Both tables hold for NCCL 2.28 and torch 2.11 to 2.13."""


def text(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of a variable of the table; its default where it is unset or empty."""
    return (os.environ if environ is None else environ).get(name) or KNOWN[name].default


def whole_number(name: str, environ: Mapping[str, str] | None = None) -> int:
    """The same as a whole number. Raises ConfigurationError for another value."""
    value = text(name, environ)
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(
            f"{name} must be a whole number", hint=f"set {name} to digits only", variable=name, value=value
        ) from None


def number(name: str, environ: Mapping[str, str] | None = None) -> float:
    """The same as a number, 0 or above. Raises ConfigurationError for another value."""
    value = text(name, environ)
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ConfigurationError(f"{name} must be a number, 0 or above", hint=f"unset {name}", variable=name, got=value)
    return found


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a switch is set to something other than 0 or false."""
    return text(name, environ).lower() not in ("", "0", "false")


def render_page() -> str:
    """The reference page, as Markdown."""
    lines = [
        "# Variables",
        "",
        "<!-- Made by `torsh env --reference`; a test compares. -->",
        "",
        "Every environment variable that torsh-distributed reads or sets. `torsh env` shows the values in this shell,",
        "and `torsh doctor` warns of `TORSH_` names that it does not know. `TORSH_PLAN__SECTION__KEY` sets a key of",
        "the [plan](plan.md); it is not listed here.",
    ]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| variable | kind | default | meaning |", "|---|---|---|---|"]
        for one in section:
            default = f"`{one.default}`" if one.default else ""
            lines.append(f"| `{one.name}` | {one.kind} | {default} | {one.meaning} |")
    lines += ["", "## Old names", "", "`torsh doctor` warns of these.", "", "| variable | use | |", "|---|---|---|"]
    lines += [f"| `{old}` | `{new}` | still read |" for old, new in RENAMED.items()]
    lines += [f"| `{old}` | `{new}` | no longer read |" for old, new in REMOVED.items()]
    return "\n".join(lines) + "\n"
