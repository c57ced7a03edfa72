"""A script around mpirun (Open MPI) or mpiexec (MPICH): ranks started by MPI, the secret in a file of the user's."""

from __future__ import annotations

import shlex
import sys

from torsh_distributed import known_variables
from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.render.rendered_files import RenderedFile, exported, folded
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import EntryKind

_SETTINGS = {
    "hostfile": "the file with the hosts, one in a line; required with several nodes",
    "mpi": "openmpi or mpich, whose options differ (openmpi)",
    "port": "where the ranks meet on the first host (29500)",
}
_PASSED = ("MASTER_ADDR", "MASTER_PORT", "TORSH_SECRET_FILE")


def render_mpi(submission: Submission) -> list[RenderedFile]:
    """`run-mpi.sh`, to be started on the first host."""
    options = submission.options
    require_known_options("mpi", options, _SETTINGS)
    if submission.nodes > 1 and not options.get("hostfile"):
        raise InvalidArgument(f"{submission.nodes} nodes need --set hostfile=FILE")
    if options.get("mpi", "openmpi") not in ("openmpi", "mpich"):
        raise InvalidArgument("mpi must be openmpi or mpich", mpi=options["mpi"])
    if submission.max_restarts or submission.elastic is not None:
        raise FeatureNotAvailable(
            "a job of MPI ends with its first rank: --max-restarts and --elastic have no effect",
            hint="leave them out, or use `torsh submit --to ssh` on the same hosts",
        )
    variables = dict(submission.env)
    if submission.plan is not None:
        variables["TORSH_PLAN"] = str(submission.plan)
    master = 'MASTER_ADDR=$(awk \'NF { sub(/[ :].*/, ""); print; exit }\' "$hosts")'
    where = ["MASTER_ADDR=127.0.0.1"]
    if "hostfile" in options:
        where = [f"hosts={shlex.quote(options['hostfile'])}", master]
    lines = [
        "#!/bin/bash",
        "# Made by torsh-distributed. Start it on the first host; the hosts share this user's home.",
        "set -euo pipefail",
        "",
        *where,
        f"MASTER_PORT={shlex.quote(options.get('port', known_variables.KNOWN['MASTER_PORT'].default))}",
        'TORSH_SECRET_FILE=$(mktemp "$HOME/.torsh-mpi-XXXXXX")',
        "trap 'rm -f \"$TORSH_SECRET_FILE\"' EXIT",
        'openssl rand -hex 32 > "$TORSH_SECRET_FILE"',
        f"export {' '.join(_PASSED)}",
        *exported(variables),
        "",
        folded(_command(submission, [*_PASSED, *sorted(variables)])),
    ]
    return [RenderedFile("run-mpi.sh", "\n".join(lines) + "\n", is_program=True)]


def _command(submission: Submission, passed: list[str]) -> list[str]:
    number, per_node = str(submission.num_workers), str(submission.workers_per_node)
    has_hosts = "hostfile" in submission.options
    if submission.options.get("mpi", "openmpi") == "openmpi":
        command = ["mpirun", "-np", number, *(["--hostfile", '"$hosts"'] if has_hosts else [])]
        command += ["--bind-to", "core", "--map-by", f"ppr:{per_node}:node"]
        for name in passed:
            command += ["-x", name]
    else:
        command = ["mpiexec", "-n", number, *(["-f", '"$hosts"'] if has_hosts else [])]
        command += ["-ppn", per_node, "-bind-to", "core", "-genvlist", ",".join(passed)]
    entry = submission.entry
    python = [shlex.quote(sys.executable), "-u"] if entry.kind is not EntryKind.COMMAND else []
    module = ["-m"] if entry.kind is EntryKind.MODULE else []
    return [*command, *python, *module, *map(shlex.quote, (entry.target, *entry.args))]
