"""Command lines of DeepSpeed's launcher; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, IoError
from torsh_distributed.launch.control.host_discovery import is_this_machine
from torsh_distributed.migrate.command_lines import TranslatedLine
from torsh_distributed.migrate.horovod.launching.host_slots import BY_HAND, HostSlots, node_options

Resources = dict[str, list[int]]
"""Host to the slots that are used there."""

_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,5})\s*$")


def read_resources(path: str) -> Resources:
    """The hosts of a hostfile: lines such as `node1 slots=4`; a duplicate or another line is an error."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise IoError("the hostfile cannot be read", path=path, reason=str(error)) from error
    found: Resources = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        if match is None or int(match[2]) < 1:
            raise InvalidArgument("a line of a hostfile reads: HOST slots=N", path=path, line=number, got=line.strip())
        if match[1] in found:
            raise InvalidArgument(f"the hostfile names {match[1]} twice", path=path, line=number)
        found[match[1]] = list(range(int(match[2])))
    if not found:
        raise InvalidArgument("the hostfile names no host", path=path)
    return found


def parse_filter(text: str, option: str) -> dict[str, list[int] | None]:
    """`host:0,2@other`: hosts with their slots, or None for all of a host."""
    found: dict[str, list[int] | None] = {}
    for part in text.split("@"):
        host, has_slots, slots = part.strip().partition(":")
        numbers = slots.split(",")
        if not host or (has_slots and not all(one.strip().isdigit() for one in numbers)):
            raise InvalidArgument(f"{option} takes hosts with slots, such as node1:0,2@node2", got=text)
        found[host] = sorted({int(one) for one in numbers}) if has_slots else None
    return found


def include(resources: Mapping[str, list[int]], wanted: Mapping[str, list[int] | None]) -> Resources:
    """Only the hosts and slots that are wanted; one that is not there is an error."""
    chosen: Resources = {}
    for host, slots in wanted.items():
        known = _known(resources, host)
        chosen[host] = known if slots is None else _checked(host, slots, known)
    return chosen


def exclude(resources: Mapping[str, list[int]], unwanted: Mapping[str, list[int] | None]) -> Resources:
    """All but these hosts and slots."""
    left = {host: list(slots) for host, slots in resources.items()}
    for host, slots in unwanted.items():
        known = _known(resources, host)
        gone = known if slots is None else _checked(host, slots, known)
        left[host] = [slot for slot in left[host] if slot not in gone]
    return {host: slots for host, slots in left.items() if slots}


def _known(resources: Mapping[str, list[int]], host: str) -> list[int]:
    if host not in resources:
        raise InvalidArgument(f"Hostname '{host}' not found in hostfile", hosts=list(resources))
    return list(resources[host])


def _checked(host: str, slots: list[int], known: list[int]) -> list[int]:
    for slot in slots:
        if slot not in known:
            raise InvalidArgument(f"No slot '{slot}' specified on host '{host}'", slots=known)
    return slots


LOCAL_RANK_VARIABLE = "TORSH_DEEPSPEED_LOCAL_RANK"
"""Tells the stand-in to pass `--local_rank=N` to the script, as DeepSpeed's launcher does."""
DEFAULT_HOSTFILE = "/job/hostfile"
_ENVIRONMENT_FILE = ".deepspeed_env"


@dataclass
class _DeepSpeedLine:
    """A command line as far as it has been read."""

    options: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    program: list[str] = field(default_factory=list)
    """`--module` or `--no-python`, before the script."""
    ssh_port: int | None = None
    is_by_hand: bool = False
    """The user starts the line on every host."""
    passes_local_rank: bool = False
    """DeepSpeed's launcher always does; a line of our options alone is for scripts that read LOCAL_RANK."""


_ReadOption = Callable[[_DeepSpeedLine, str, str], None]


@dataclass(frozen=True, slots=True)
class LauncherOption:
    """What an option of DeepSpeed's launcher takes and means."""

    has_value: bool
    read: _ReadOption


def _text(name: str) -> LauncherOption:
    return LauncherOption(True, lambda line, flag, value: setattr(line, name, value))


def _count(name: str) -> LauncherOption:
    def read(line: _DeepSpeedLine, flag: str, value: str) -> None:
        if not value.lstrip("-").isdigit():
            raise InvalidArgument(f"{flag} takes a whole number", got=value)
        if int(value) >= 0:  # -1 is DeepSpeed's default: all of them
            setattr(line, name, int(value))

    return LauncherOption(True, read)


def _ours(name: str) -> LauncherOption:
    def read(line: _DeepSpeedLine, flag: str, value: str) -> None:
        line.options += [name, value]

    return LauncherOption(True, read)


def _unneeded(has_value: bool, reason: str) -> LauncherOption:
    return LauncherOption(has_value, lambda line, flag, value: line.notes.append(f"{flag} has no effect: {reason}"))


def _refusal(has_value: bool, reason: str, hint: str) -> LauncherOption:
    def read(line: _DeepSpeedLine, flag: str, value: str) -> None:
        raise FeatureNotAvailable(f"{flag} is not supported: {reason}", hint=hint, option=flag)

    return LauncherOption(has_value, read)


def _take_module(line: _DeepSpeedLine, flag: str, value: str) -> None:
    line.program.append("--module")


def _take_no_python(line: _DeepSpeedLine, flag: str, value: str) -> None:
    line.program.append("--no-python")


def _no_local_rank(line: _DeepSpeedLine, flag: str, value: str) -> None:
    line.env[LOCAL_RANK_VARIABLE] = "0"


def _no_ssh(line: _DeepSpeedLine, flag: str, value: str) -> None:
    line.is_by_hand = True


def _take_launcher(line: _DeepSpeedLine, flag: str, value: str) -> None:
    if value.lower() != "pdsh":
        submits = "use `torsh submit --to slurm`" if value.lower() == "slurm" else "use `torsh run --mpi`"
        raise FeatureNotAvailable(f"{flag} {value} is not supported: {_OVER_SSH}", hint=submits, option=flag)
    line.notes.append(f"{flag} {value} has no effect: {_OVER_SSH}")


def _quiet(line: _DeepSpeedLine, flag: str, value: str) -> None:
    line.env["TORSH_LOG"] = "error"


def _strict(line: _DeepSpeedLine, flag: str, value: str) -> None:
    line.env["TORSH_STRICT_CONFIG"] = "1"


_OVER_SSH = "hosts are entered with ssh itself"
_RANGE = "the number of nodes is fixed while a job runs"

OPTIONS: dict[str, LauncherOption] = {
    "-H": _text("hostfile"),
    "--hostfile": _text("hostfile"),
    "-i": _text("include"),
    "--include": _text("include"),
    "-e": _text("exclude"),
    "--exclude": _text("exclude"),
    "--num_nodes": _count("num_nodes"),
    "--num_gpus": _count("num_gpus"),
    "--num_accelerators": _count("num_gpus"),
    "--master_port": _ours("--master-port"),
    "--master_addr": _ours("--master-addr"),
    "--node_rank": _ours("--node-rank"),
    "--module": LauncherOption(False, _take_module),
    "--no_python": LauncherOption(False, _take_no_python),
    "--no_local_rank": LauncherOption(False, _no_local_rank),
    "--enable_each_rank_log": _ours("--log-dir"),
    "--log_level": LauncherOption(True, lambda line, flag, value: line.env.update(TORSH_LOG=value)),
    "-q": LauncherOption(False, _quiet),
    "--quiet": LauncherOption(False, _quiet),
    "--no_ssh": LauncherOption(False, _no_ssh),
    "--no_ssh_check": _unneeded(False, "a host that cannot be entered is named when the job starts"),
    "--force_multi": _unneeded(False, "one host of the list is entered if it is not this machine"),
    "--save_pid": _unneeded(False, "`torsh doctor --job all` finds the job without a file"),
    "--bind_cores_to_rank": _unneeded(False, "threads are not pinned: use taskset or numactl"),
    "--bind_core_list": _refusal(True, "threads are not pinned", "use taskset or numactl"),
    "--min_elastic_nodes": _unneeded(True, _RANGE),
    "--max_elastic_nodes": _unneeded(True, _RANGE),
    "--elastic_training": _refusal(False, _RANGE, "use `torsh run --max-restarts`, or a plan with elastic.enabled"),
    "--ssh_port": _count("ssh_port"),
    "--launcher": LauncherOption(True, _take_launcher),
    "--launcher_args": _refusal(True, _OVER_SSH, "put settings of ssh into ~/.ssh/config"),
    "--venv_script": _refusal(True, "no shell is started on the hosts", "name the interpreter with --ssh-python"),
    "--autotuning": _refusal(
        True,
        "it starts jobs of its own to try settings",
        "record the job without it (`torsh run --trace DIR …`); `torsh why DIR` recommends settings, and "
        "`torsh tune DIR --apply 1` runs the job with one of them and measures the gain",
    ),
}
"""Every option of `deepspeed`, and what becomes of it."""
OWN_OPTIONS: dict[str, LauncherOption] = {"--strict": LauncherOption(False, _strict)}
"""Options of `torsh run --as deepspeed` alone: keys of a config that have no effect are errors."""


def translate(args: Sequence[str], ours: Mapping[str, bool]) -> TranslatedLine:
    """A line of `deepspeed`, mixed or not with options of `torsh run`, as one of `torsh run`."""
    line = _DeepSpeedLine()
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        option = OPTIONS.get(name) or OWN_OPTIONS.get(name)
        # `--master_port` and its like are spelled alike in both.
        if option is None:
            line.options.append(word)
            if ours.get(name.replace("_", "-"), False) and not has_value and rest:
                line.options.append(rest.pop(0))
            continue
        if option.has_value and not has_value:
            if not rest:
                raise InvalidArgument(f"{name} needs a value", option=name)
            value = rest.pop(0)
        line.passes_local_rank = line.passes_local_rank or name in OPTIONS
        option.read(line, name, value)
    if rest[:1] == ["--"]:
        del rest[0]
    if line.passes_local_rank:
        line.env.setdefault(LOCAL_RANK_VARIABLE, "1")
    where = _workers(line)
    if line.ssh_port is not None and "--ssh" in where:
        where += ["--ssh-option", f"Port={line.ssh_port}"]
    elif line.ssh_port is not None:
        line.notes.append("--ssh_port has no effect: no host is entered over SSH")
    line.env = {**_from_environment_file(), **line.env}
    return TranslatedLine(args=[*line.options, *where, *line.program, *rest], env=line.env, notes=line.notes)


def _workers(line: _DeepSpeedLine) -> list[str]:
    """Where the workers run, and how many."""
    if line.include and line.exclude:
        raise InvalidArgument("--include and --exclude exclude each other", hint="give one of the two")
    chosen = line.include or line.exclude
    if chosen and (line.num_gpus is not None or line.num_nodes is not None):
        raise InvalidArgument("--num_nodes/--num_gpus exclude --include/--exclude", hint="give one of the two")
    resources = _resources(line)
    if line.include:
        wanted = parse_filter(line.include, "--include")
        resources = include(resources or {host: slots or [0] for host, slots in wanted.items()}, wanted)
    elif line.exclude:
        if resources is None:
            raise InvalidArgument("--exclude needs a hostfile", hint="name the hosts with --hostfile")
        resources = exclude(resources, parse_filter(line.exclude, "--exclude"))
    if resources is None:
        if line.num_nodes is not None and line.num_nodes > 1:
            raise InvalidArgument("--num_nodes above 1 needs a hostfile", hint="name the hosts with --hostfile")
        return [] if line.num_gpus is None else ["--nproc-per-node", str(line.num_gpus)]
    if line.num_nodes is not None:
        resources = dict(list(resources.items())[: line.num_nodes])
    if line.num_gpus is not None:
        resources = {host: slots[: line.num_gpus] for host, slots in resources.items()}
    _choose_devices(line, resources)
    by_hand = not BY_HAND.isdisjoint(word.partition("=")[0].replace("_", "-") for word in line.options)
    hosts = [HostSlots(host, len(slots)) for host, slots in resources.items()]
    return node_options(hosts, None, by_hand=by_hand or line.is_by_hand)


def _resources(line: _DeepSpeedLine) -> Resources | None:
    if line.hostfile is not None:
        return read_resources(line.hostfile)
    return read_resources(DEFAULT_HOSTFILE) if Path(DEFAULT_HOSTFILE).is_file() else None


def _choose_devices(line: _DeepSpeedLine, resources: Resources) -> None:
    """Slots are GPUs: workers of this machine see those that are used here."""
    for host, slots in resources.items():
        if is_this_machine(host) and slots != list(range(len(slots))):
            line.env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))


def _from_environment_file() -> dict[str, str]:
    """Variables of `.deepspeed_env`, in the home or the present directory; the latter wins."""
    found: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()):
        path = folder / _ENVIRONMENT_FILE
        if path.is_file():
            for line in path.read_text().splitlines():
                name, is_set, value = line.strip().partition("=")
                if is_set and not name.startswith("#"):
                    found[name] = value
    return found
