"""Options of `mpirun` and `mpiexec`, of Open MPI and MPICH, that say where processes run and what they inherit."""

from __future__ import annotations

import math

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.launching.host_slots import HostSlots, parse_hosts, read_hostfile
from torsh_distributed.migrate.launchers.line_draft import (
    LineDraft,
    LineOption,
    as_option,
    keep,
    same_anyway,
    without_effect,
)
from torsh_distributed.migrate.report import Verdict


def _exported(draft: LineDraft, option: str, values: list[str]) -> None:
    """Open MPI's -x NAME or NAME=VALUE."""
    name, has_value, value = values[0].partition("=")
    if has_value:
        draft.env[name] = value
        draft.note(option, values, Verdict.HONOURED, f"{name}={value}")
    else:
        draft.note(option, values, Verdict.EQUIVALENT, "", "workers inherit the environment of their launcher")


def _named_variable(draft: LineDraft, option: str, values: list[str]) -> None:
    """MPICH's -genv NAME VALUE."""
    draft.env[values[0]] = values[1]
    draft.note(option, values, Verdict.HONOURED, f"{values[0]}={values[1]}")


_PINNING = "threads are not pinned: use taskset or numactl inside the job"
_TRANSPORT = "the backend of td.init() moves the bytes; with --mpi MPICH does"

MPIRUN_OPTIONS: dict[str, LineOption] = {
    **dict.fromkeys(("-n", "-np", "--np", "-c"), keep("num_ranks")),
    **dict.fromkeys(("-H", "-host", "--host", "-hosts", "--hosts"), keep("hosts")),
    **dict.fromkeys(("-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f"), keep("hostfile")),
    **dict.fromkeys(("-ppn", "--ppn", "-perhost", "-npernode", "--npernode", "-N"), keep("per_node")),
    "-x": LineOption(1, _exported),
    **dict.fromkeys(("-genv", "-env"), LineOption(2, _named_variable)),
    **dict.fromkeys(("-genvall", "-envall"), same_anyway("workers inherit the environment of their launcher", 0)),
    **dict.fromkeys(("-wdir", "--wdir", "-wd"), without_effect("change to that directory before `torsh run`")),
    **dict.fromkeys(("--mca", "-mca", "--gmca", "-gmca"), without_effect(_TRANSPORT, 2)),
    **dict.fromkeys(("--bind-to", "-bind-to", "--map-by", "-map-by", "--rank-by"), without_effect(_PINNING)),
    **dict.fromkeys(
        ("--oversubscribe", "-oversubscribe", "--allow-run-as-root", "--report-bindings", "--display-map", "-l", "-v"),
        without_effect("nothing has to be allowed for it", 0),
    ),
    **dict.fromkeys(("--tag-output", "-prepend-rank"), same_anyway("a failure names its rank", 0)),
    **dict.fromkeys(("--output-filename", "-outfile-pattern"), as_option("--log-dir")),
    **dict.fromkeys(("--quiet", "-q"), without_effect("only the script prints", 0)),
}
"""Options that jobs are started with; `--map-by ppr:N:node` pins nothing and is read by its text."""


def place(draft: LineDraft) -> None:
    """Options of `torsh run` for the ranks and hosts that were read."""
    hosts = _hosts(draft)
    wanted = _number(draft, "num_ranks")
    per_node = _number(draft, "per_node")
    if hosts is None:
        draft.options += ["--nproc-per-node", str(wanted or 1)]
        draft.note("-n", [str(wanted or 1)], Verdict.HONOURED, f"--nproc-per-node {wanted or 1}")
        return
    slots = per_node or max(one.slots for one in hosts)
    num_nodes = len(hosts) if wanted is None else min(len(hosts), math.ceil(wanted / slots))
    if wanted is not None and (wanted % num_nodes or wanted > num_nodes * slots):
        raise InvalidArgument(
            "every node of a job has the same number of workers",
            hint="choose a number of ranks that the hosts share evenly",
            ranks=wanted,
            hosts=", ".join(f"{one.host}:{one.slots}" for one in hosts),
        )
    workers = slots if wanted is None else wanted // num_nodes
    where = ["--nnodes", str(num_nodes), "--node-rank", "$NODE_RANK", "--master-addr", hosts[0].host]
    draft.options += ["--nproc-per-node", str(workers), *(where if num_nodes > 1 else [])]
    names = ", ".join(f"{index} on {one.host}" for index, one in enumerate(hosts[:num_nodes]))
    draft.note(
        "-H",
        [names],
        Verdict.EQUIVALENT,
        " ".join(where),
        f"run the line on every host with a shared --token-file: NODE_RANK {names}" if num_nodes > 1 else "",
    )


def _hosts(draft: LineDraft) -> list[HostSlots] | None:
    if "hostfile" in draft.taken:
        return read_hostfile(draft.taken["hostfile"])
    return parse_hosts(draft.taken["hosts"]) if "hosts" in draft.taken else None


def _number(draft: LineDraft, name: str) -> int | None:
    text = draft.taken.get(name)
    if text is not None and (not text.isdigit() or int(text) < 1):
        raise InvalidArgument("a number of ranks is a whole number above 0", got=text)
    return None if text is None else int(text)
