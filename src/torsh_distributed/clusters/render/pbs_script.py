"""A script for PBS (OpenPBS, PBS Professional): one launcher per node, started by pbsdsh."""

from __future__ import annotations

import math
import shlex

from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.kubernetes.kubernetes_options import quantity
from torsh_distributed.clusters.render.rendered_files import RenderedFile, exported, folded
from torsh_distributed.clusters.run_arguments import entry_arguments
from torsh_distributed.clusters.submission import Submission

_SETTINGS = {
    "queue": "the queue",
    "account": "whose account pays",
    "place": "how nodes are taken; scatter puts each on another machine",
    "activate": "a line of shell before the job, such as `module load python`",
}


def render_pbs(submission: Submission) -> list[RenderedFile]:
    """`job.pbs`, for `qsub job.pbs`."""
    require_known_options("pbs", submission.options, _SETTINGS)
    return [RenderedFile("job.pbs", pbs_script(submission), is_program=True)]


def pbs_script(submission: Submission) -> str:
    """The script. Ranks come from `torsh run`; PBS gives it the nodes and their order."""
    options = submission.options
    directives = [f"-N {submission.name[:15]}", f"-l select={submission.nodes}:{_chunk(submission)}"]
    directives.append(f"-l place={options.get('place', 'scatter')}")
    if submission.time_limit_s is not None:
        directives.append(f"-l walltime={_walltime(submission.time_limit_s)}")
    directives += [f"-q {options['queue']}"] if "queue" in options else []
    directives += [f"-A {options['account']}"] if "account" in options else []
    directives += ["-j oe", "-r y"]
    run = [
        "torsh",
        "run",
        *("--nnodes", str(submission.nodes), "--node-rank", '"$node_rank"'),
        *("--master-addr", '"$master"', "--master-port", '"$port"'),
        *("--nproc-per-node", str(submission.workers_per_node), "--token-file", '"$token"'),
        *map(shlex.quote, entry_arguments(submission)),
    ]
    lines = [
        "#!/bin/bash",
        *(f"#PBS {directive}" for directive in directives),
        "# Made by torsh-distributed. Submit it with `qsub job.pbs`; a copy of it runs on every node.",
        "set -euo pipefail",
        "",
        'cd "$PBS_O_WORKDIR"',
        *([options["activate"]] if "activate" in options else []),
        *exported(submission.env),
        "",
        'master=$(head -n 1 "$PBS_NODEFILE")',
        "# Jobs share nodes: a port derived from the job's number keeps them apart.",
        "number=${PBS_JOBID%%[!0-9]*}",
        "port=$((10000 + number % 20000))",
        "# The secret is in a file of this user's home, which the nodes share.",
        'token="$HOME/.torsh-$number.token"',
        'copy="$HOME/.torsh-$number.sh"',
        "",
        'if [[ "${1:-}" != node ]]; then',
        '  (umask 077 && openssl rand -hex 32 > "$token")',
        '  trap \'rm -f "$token" "$copy"\' EXIT',
        "  # PBS keeps this script on the first node alone; pbsdsh starts a copy of it on all of them.",
        '  cp "$0" "$copy"',
        '  pbsdsh -- /bin/bash -l "$copy" node',
        "  exit",
        "fi",
        "",
        "# The line of PBS_NODEFILE that this task was started for.",
        "node_rank=$PBS_VNODENUM",
        "exec " + folded(run),
    ]
    return "\n".join(lines) + "\n"


def _chunk(submission: Submission) -> str:
    workers = submission.workers_per_node
    # One line of PBS_NODEFILE per node: `torsh run` starts the ranks of a node itself.
    parts = [f"ncpus={submission.cpus_per_worker * workers}", "mpiprocs=1"]
    if submission.gpus_per_worker:
        parts.append(f"ngpus={submission.gpus_per_worker * workers}")
    if submission.memory_per_worker is not None:
        amount = quantity(submission.memory_per_worker, times=workers)
        parts.append(f"mem={amount.replace('i', '').lower()}b")
    return ":".join(parts)


def _walltime(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
