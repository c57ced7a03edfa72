"""A whole command of another launcher: whose it is, and the line of `torsh run` with a plan that does the same."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.launching.host_slots import HostSlots, parse_hosts, read_hostfile
from torsh_distributed.migrate.launchers.accelerate_config import AccelerateConfig
from torsh_distributed.migrate.launchers.accelerate_options import read_accelerate
from torsh_distributed.migrate.launchers.line_draft import (
    LineDraft,
    LineOption,
    as_option,
    keep,
    not_here,
    read_options,
    same_anyway,
    without_effect,
)
from torsh_distributed.migrate.report import KeyVerdict, MigrationReport, Verdict
from torsh_distributed.plan.plan import Plan


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


def _nnodes(draft: LineDraft, option: str, values: list[str]) -> None:
    first, colon, last = values[0].partition(":")
    if not colon or first == last:
        draft.options += ["--nnodes", first]
        draft.note(option, values, Verdict.HONOURED, f"--nnodes {first}")
        return
    draft.options += ["--nnodes", last, "--elastic"]
    draft.note(
        option,
        values,
        Verdict.EQUIVALENT,
        f"--nnodes {last} --elastic",
        "survivors go on; workers come and go by torsh scale",
    )


def _endpoint_kind(draft: LineDraft, option: str, values: list[str]) -> None:
    if values[0] in ("static", "c10d"):
        draft.options += ["--rdzv-backend", values[0]]
        draft.note(option, values, Verdict.HONOURED, f"--rdzv-backend {values[0]}")
    else:
        draft.note(option, values, Verdict.REFUSED, "", "the launcher of node 0 serves the rendezvous: use c10d")


TORCHRUN_OPTIONS: dict[str, LineOption] = {
    "--nnodes": LineOption(1, _nnodes),
    "--nproc-per-node": as_option("--nproc-per-node"),
    "--rdzv-backend": LineOption(1, _endpoint_kind),
    "--rdzv-endpoint": as_option("--rdzv-endpoint"),
    "--rdzv-id": as_option("--rdzv-id"),
    "--rdzv-conf": without_effect("--join-timeout is the time for launchers to meet"),
    "--standalone": as_option("--standalone", 0),
    "--max-restarts": as_option("--max-restarts"),
    "--monitor-interval": same_anyway("the end of a worker is an event, not polled"),
    "--start-method": as_option("--start-method"),
    "--event-log-handler": without_effect("TORSH_EVENTS_DIR=DIR keeps events"),
    "--role": as_option("--role"),
    "--module": as_option("--module", 0),
    "-m": as_option("--module", 0),
    "--no-python": as_option("--no-python", 0),
    "--run-path": not_here("leave it out: a script runs under its own path", 0),
    "--log-dir": as_option("--log-dir"),
    "--redirects": without_effect("--log-dir keeps both streams of every rank"),
    "-r": without_effect("--log-dir keeps both streams of every rank"),
    "--tee": without_effect("--log-dir keeps both streams, and they are shown"),
    "-t": without_effect("--log-dir keeps both streams, and they are shown"),
    "--local-ranks-filter": as_option("--local-ranks-filter"),
    "--duplicate-stdout-filters": without_effect("--log-dir keeps whole streams"),
    "--duplicate-stderr-filters": without_effect("--log-dir keeps whole streams"),
    "--node-rank": as_option("--node-rank"),
    "--master-addr": as_option("--master-addr"),
    "--master-port": as_option("--master-port"),
    "--local-addr": without_effect("ranks listen where the route to the master leaves this node"),
    "--logs-specs": not_here("use --log-dir"),
    "--numa-binding": not_here("use numactl inside the job"),
    "--signals-to-handle": same_anyway("SIGTERM, SIGINT and SIGHUP are passed on"),
    "--shutdown-timeout": as_option("--shutdown-timeout"),
    "--virtual-local-rank": not_here("set CUDA_VISIBLE_DEVICES in the script by LOCAL_RANK", 0),
    # torch.distributed.launch
    "--use-env": same_anyway("ranks are in the environment", 0),
}
"""Every option of torch 2.13's torchrun."""


@dataclass(frozen=True, kw_only=True)
class LaunchTranslation:
    """The same job under `torsh run`."""

    words: tuple[str, ...]
    """The command, beginning with `torsh run`; `{plan}` stands for the plan's file."""
    env: dict[str, str]
    """Variables to set before it."""
    plan: Plan | None
    """How to train, where the line said so."""
    report: MigrationReport

    def text(self, plan_file: str = "plan.toml") -> str:
        """The command as a shell reads it."""
        words = [plan_file if word == "{plan}" else word for word in self.words]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        # $NODE_RANK is for the shell.
        return " ".join([*variables, *(word if word.startswith("$") else shlex.quote(word) for word in words)])


def translate_command(words: Sequence[str]) -> LaunchTranslation:
    """The job of a command of torchrun, mpirun, accelerate, deepspeed or horovodrun, under `torsh run`.

    Raises InvalidArgument for other commands and for options that the launcher does not have.
    """
    env, rest = _variables(list(words))
    kind, arguments = _launcher(rest)
    made = _TRANSLATORS[kind](arguments)
    return LaunchTranslation(words=made.words, env={**env, **made.env}, plan=made.plan, report=made.report)


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Assignments before a command."""
    env = {}
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return env, words


def _launcher(words: list[str]) -> tuple[str, list[str]]:
    name = Path(words[0]).name if words else ""
    if name.startswith("python") and words[1:2] == ["-m"] and len(words) > 2:
        module = {
            "torch.distributed.run": "torchrun",
            "torch.distributed.launch": "torchrun",
            "accelerate.commands.launch": "accelerate",
        }.get(words[2], "")
        if module:
            return module, words[3:]
    if name == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate", words[2:]
    if name == "accelerate-launch":
        return "accelerate", words[1:]
    known = {"mpiexec": "mpirun", "orterun": "mpirun", "mpiexec.hydra": "mpirun", "horovodrun": "horovod"}
    kind = known.get(name, name)
    if kind in _TRANSLATORS and kind != "accelerate":
        return kind, words[1:]
    raise InvalidArgument(
        f"{name or 'an empty line'} is not a launcher that is known here",
        hint="known: torchrun, python -m torch.distributed.run, mpirun, accelerate launch, deepspeed, horovodrun",
    )


def _torchrun(words: list[str]) -> LaunchTranslation:
    draft = LineDraft("torchrun")
    program = read_options(draft, words, TORCHRUN_OPTIONS)
    return _finished(draft, program)


def _mpirun(words: list[str]) -> LaunchTranslation:
    draft = LineDraft("mpirun")
    program = read_options(draft, words, MPIRUN_OPTIONS)
    place(draft)
    draft.note(
        "mpirun",
        ["…"],
        Verdict.EQUIVALENT,
        "td.init()",
        "add --mpi if the script calls mpi4py itself; ranks are in RANK",
    )
    return _finished(draft, _without_python(program))


def _accelerate(words: list[str]) -> LaunchTranslation:
    values, options, env, program = read_accelerate(words)
    config = AccelerateConfig(values)
    plan, report = config.to_plan()
    line = ["torsh", "run", *config.launch_options(), *options, "--plan", "{plan}", *program]
    return LaunchTranslation(words=tuple(line), env=env, plan=plan, report=report)


def _as_library(library: str) -> Callable[[list[str]], LaunchTranslation]:
    def translate(words: list[str]) -> LaunchTranslation:
        """The line stays as it is behind `--as`."""
        means = f"torsh run --as {library}"
        entry = KeyVerdict(library, shlex.join(words), Verdict.HONOURED, means, "it reads these options itself")
        report = MigrationReport(library, (entry,))
        return LaunchTranslation(words=("torsh", "run", "--as", library, *words), env={}, plan=None, report=report)

    return translate


def _finished(draft: LineDraft, program: list[str]) -> LaunchTranslation:
    if not program:
        raise InvalidArgument(
            f"{draft.launcher}: there is no script in the line", hint="options come before the script"
        )
    report = MigrationReport(draft.launcher, tuple(draft.entries))
    words = ("torsh", "run", *draft.options, *program)
    return LaunchTranslation(words=words, env=draft.env, plan=None, report=report)


def _without_python(program: list[str]) -> list[str]:
    """`python train.py` as `torsh run` takes it."""
    if not program or not Path(program[0]).name.startswith("python"):
        return program if program[:1] and program[0].endswith(".py") else ["--no-python", *program]
    rest = [word for index, word in enumerate(program[1:]) if not (word == "-u" and index == 0)]
    return ["--module", *rest[1:]] if rest[:1] == ["-m"] else rest


_TRANSLATORS: dict[str, Callable[[list[str]], LaunchTranslation]] = {
    "torchrun": _torchrun,
    "mpirun": _mpirun,
    "accelerate": _accelerate,
    "deepspeed": _as_library("deepspeed"),
    "horovod": _as_library("horovod"),
}
