"""The options of `horovodrun`, as arguments of `torsh run` and variables of its workers; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.migrate.command_lines import TranslatedLine
from torsh_distributed.migrate.horovod.launching.horovodrun_yaml import config_flags
from torsh_distributed.migrate.horovod.launching.host_slots import (
    BY_HAND,
    HostSlots,
    node_options,
    parse_hosts,
    read_hostfile,
)


@dataclass
class _Line:
    """A command line as far as it has been read."""

    options: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_proc: int | None = None
    least: int | None = None
    most: int | None = None
    hosts: list[HostSlots] | None = None
    slots_per_host: int | None = None
    discovery_script: str | None = None
    cooldown: str | None = None
    elastic_timeout: str | None = None
    ssh: dict[str, str] = field(default_factory=dict)
    """By option: what ssh is told, if hosts are entered."""


_Read = Callable[[_Line, str, list[str]], None]


@dataclass(frozen=True, slots=True)
class _Flag:
    """What an option takes and means."""

    num_values: int
    read: _Read


def _variable(name: str, change: Callable[[str], str] = str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        line.env[name] = change(values[0])

    return _Flag(1, read)


def _switch(name: str, value: str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        line.env[name] = value

    return _Flag(0, read)


def _option(name: str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        line.options += [name, values[0]]

    return _Flag(1, read)


def _field(name: str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        setattr(line, name, _whole_number(flag, values[0]))

    return _Flag(1, read)


def _text(name: str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        setattr(line, name, values[0])

    return _Flag(1, read)


def _ssh(name: str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        line.ssh[flag] = f"{name}={values[0]}"

    return _Flag(1, read)


def _no_effect(num_values: int, reason: str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        line.notes.append(f"{flag} has no effect: {reason}")

    return _Flag(num_values, read)


def _refused(num_values: int, reason: str, hint: str) -> _Flag:
    def read(line: _Line, flag: str, values: list[str]) -> None:
        raise FeatureNotAvailable(f"{flag} is not supported: {reason}", hint=hint, option=flag)

    return _Flag(num_values, read)


def _nothing(line: _Line, flag: str, values: list[str]) -> None:
    """The option asks for what happens anyway."""


def _take_hosts(line: _Line, flag: str, values: list[str]) -> None:
    line.hosts = parse_hosts(values[0])


def _take_hostfile(line: _Line, flag: str, values: list[str]) -> None:
    line.hosts = read_hostfile(values[0])


def _take_interface(line: _Line, flag: str, values: list[str]) -> None:
    line.env["GLOO_SOCKET_IFNAME"] = values[0]
    line.env["NCCL_SOCKET_IFNAME"] = f"={values[0]}"


def _take_cooldown(line: _Line, flag: str, values: list[str]) -> None:
    line.cooldown = "-".join(values)


def _take_reset_limit(line: _Line, flag: str, values: list[str]) -> None:
    line.options += ["--max-restarts", str(_whole_number(flag, values[0]))]
    line.env["HOROVOD_RESET_LIMIT"] = values[0]
    line.env["HOROVOD_ELASTIC"] = "1"


def _take_timestamps(line: _Line, flag: str, values: list[str]) -> None:
    line.notes.append(f"{flag} has no effect: lines are shown as workers write them")


def _take_config(line: _Line, flag: str, values: list[str]) -> None:
    for words in config_flags(values[0], {name: one.num_values for name, one in FLAGS.items()}):
        _take(line, words[0], list(words[1:]))


def _whole_number(flag: str, text: str) -> int:
    if not text.isdigit():
        raise InvalidArgument(f"{flag} takes a whole number", got=text)
    return int(text)


def _megabytes(text: str) -> str:
    try:
        return str(int(float(text) * 2**20))
    except ValueError:
        raise InvalidArgument("--fusion-threshold-mb takes a number", got=text) from None


_BACKEND = "the torsh backend goes through shared memory on a node and over the network between nodes by itself"
_TUNING = "the defaults need no tuning"
_ELASTIC_TIMEOUT_S = "600"
"""Horovod's default: how long an elastic job waits for slots."""
_UNBOUNDED = 65536
"""Workers of an elastic job for which Horovod is given no limit."""

FLAGS: dict[str, _Flag] = {
    "-np": _field("num_proc"),
    "--num-proc": _field("num_proc"),
    "-H": _Flag(1, _take_hosts),
    "--hosts": _Flag(1, _take_hosts),
    "-hostfile": _Flag(1, _take_hostfile),
    "--hostfile": _Flag(1, _take_hostfile),
    "--config-file": _Flag(1, _take_config),
    "--start-timeout": _option("--join-timeout"),
    "--elastic-timeout": _text("elastic_timeout"),
    "--network-interface": _Flag(1, _take_interface),
    "--network-interfaces": _Flag(1, _take_interface),
    "--output-filename": _option("--log-dir"),
    "--disable-cache": _no_effect(0, "no checks of other hosts are made, so none are remembered"),
    "--version": _refused(0, "it is not part of a job", "run `torsh --version`"),
    "-cb": _refused(0, "it is not part of a job", "run `torsh env`"),
    "--check-build": _refused(0, "it is not part of a job", "run `torsh env`"),
    "-p": _ssh("Port"),
    "--ssh-port": _ssh("Port"),
    "-i": _ssh("IdentityFile"),
    "--ssh-identity-file": _ssh("IdentityFile"),
    # Packing and tuning.
    "--fusion-threshold-mb": _variable("HOROVOD_FUSION_THRESHOLD", _megabytes),
    "--cache-capacity": _variable("HOROVOD_CACHE_CAPACITY"),
    "--cycle-time-ms": _variable("HOROVOD_CYCLE_TIME"),
    **{
        f"--{no}{what}": _no_effect(0, _BACKEND)
        for no in ("", "no-")
        for what in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce")
    },
    "--autotune": _no_effect(0, _TUNING),
    "--no-autotune": _Flag(0, _nothing),
    **{
        f"--autotune-{what}": _no_effect(1, _TUNING)
        for what in (
            "log-file",
            "warmup-samples",
            "steps-per-sample",
            "bayes-opt-max-samples",
            "gaussian-process-noise",
        )
    },
    # Elastic jobs.
    "--min-np": _field("least"),
    "--min-num-proc": _field("least"),
    "--max-np": _field("most"),
    "--max-num-proc": _field("most"),
    "--slots-per-host": _field("slots_per_host"),
    "--slots": _field("slots_per_host"),
    "--reset-limit": _Flag(1, _take_reset_limit),
    "--host-discovery-script": _text("discovery_script"),
    "--blacklist-cooldown-range": _Flag(2, _take_cooldown),
    # Timeline and stalls.
    "--timeline-filename": _variable("HOROVOD_TIMELINE"),
    "--timeline-mark-cycles": _switch("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    "--no-timeline-mark-cycles": _switch("HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    "--no-stall-check": _switch("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "--stall-check": _switch("HOROVOD_STALL_CHECK_DISABLE", "0"),
    "--stall-check-warning-time-seconds": _variable("HOROVOD_STALL_CHECK_TIME_SECONDS"),
    "--stall-check-shutdown-time-seconds": _variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    # Libraries underneath.
    "--gloo": _Flag(0, _nothing),
    "--jsrun": _refused(0, "jobs are started by `torsh run` itself", "leave it out"),
    "--mpi-threads-disable": _no_effect(0, "no MPI is underneath"),
    "--no-mpi-threads-disable": _no_effect(0, "no MPI is underneath"),
    "--mpi-args": _refused(1, "no mpirun is called", "leave it out, or start the script with mpirun"),
    "--tcp": _no_effect(0, "no MPI is underneath"),
    "--binding-args": _refused(1, "no mpirun is called", "use taskset or numactl inside the job"),
    "--num-nccl-streams": _no_effect(1, "operations of a process set use one stream"),
    "--thread-affinity": _refused(1, "threads are not pinned", "use taskset or numactl inside the job"),
    "--gloo-timeout-seconds": _variable("TORSH_INIT_TIMEOUT"),
    "--log-level": _variable("TORSH_LOG"),
    "--log-with-timestamp": _Flag(0, _take_timestamps),
    "--log-without-timestamp": _Flag(0, _take_timestamps),
    "-prefix-timestamp": _Flag(0, _take_timestamps),
    "--prefix-output-with-timestamp": _Flag(0, _take_timestamps),
    "--no-log-hide-timestamp": _Flag(0, _take_timestamps),
    "--log-hide-timestamp": _Flag(0, _take_timestamps),
}
"""Every option of `horovodrun`, and what becomes of it. `--mpi` and `--verbose` are those of `torsh run`."""

_PYTHON = re.compile(r"python(3(\.\d+)?)?$")


def translate(args: Sequence[str], ours: Mapping[str, bool]) -> TranslatedLine:
    """A line of `horovodrun`, mixed or not with options of `torsh run`, as one of `torsh run`."""
    line = _Line()
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if name in FLAGS:
            flag = FLAGS[name]
            values = [value] if has_value else rest[: flag.num_values]
            if len(values) < flag.num_values:
                raise InvalidArgument(f"{name} needs {flag.num_values} value(s)", option=name)
            if not has_value:
                del rest[: flag.num_values]
            _take(line, name, values)
            continue
        line.options.append(word)
        spelled = name.replace("_", "-")
        if ours.get(spelled, False) and not has_value and rest:
            line.options.append(rest.pop(0))
    if rest[:1] == ["--"]:
        del rest[0]
    where = _placement(line)
    if "--ssh" in where or line.discovery_script is not None:
        where += [word for setting in line.ssh.values() for word in ("--ssh-option", setting)]
    else:
        line.notes += [f"{flag} has no effect: no host is entered over SSH" for flag in line.ssh]
    return TranslatedLine(args=[*line.options, *where, *_program(rest)], env=line.env, notes=line.notes)


def _take(line: _Line, name: str, values: list[str]) -> None:
    FLAGS[name].read(line, name, values)


def _placement(line: _Line) -> list[str]:
    """Where the workers run."""
    if line.discovery_script is not None:
        return _discovery(line, line.discovery_script)
    if line.cooldown is not None:
        line.notes.append("--blacklist-cooldown-range has no effect: without a script that names others, hosts stay")
    is_elastic = line.least is not None or line.most is not None
    if line.elastic_timeout is not None:
        line.options += ["--wait-timeout" if is_elastic else "--join-timeout", line.elastic_timeout]
    if is_elastic:
        _check_range(line)
    if line.num_proc is None and line.hosts is None:
        return []
    _refuse_two_numbers(line)
    hosts = line.hosts
    if hosts is None:
        return ["--nproc-per-node", str(line.num_proc)]
    if line.slots_per_host is not None:
        hosts = [HostSlots(one.host, line.slots_per_host) for one in hosts]
    by_hand = not BY_HAND.isdisjoint(word.partition("=")[0].replace("_", "-") for word in line.options)
    return node_options(hosts, line.num_proc, by_hand=by_hand)


def _refuse_two_numbers(line: _Line) -> None:
    if "--nproc-per-node" in line.options:
        raise InvalidArgument("-np and --nproc-per-node say the same thing twice", hint="give one of the two")


def _discovery(line: _Line, script: str) -> list[str]:
    """An elastic job whose hosts a script names. It starts with all slots, as soon as there are `-np` of them."""
    if line.hosts is not None:
        raise InvalidArgument(
            "--host-discovery-script and -H or --hostfile say the same thing twice", hint="give one of the two"
        )
    if line.num_proc is not None:
        _refuse_two_numbers(line)
    # As in Horovod: without --min-np no fewer than -np, and without --max-np as many as there are slots.
    start = line.num_proc or line.least or 1
    least, most = line.least or start, line.most or _UNBOUNDED
    _require_between(start, least, most)
    line.env["HOROVOD_ELASTIC"] = "1"
    words = ["--elastic", "--min-workers", str(least), "--max-workers", str(most), "--nproc-per-node", str(start)]
    words += ["--wait-timeout", line.elastic_timeout or _ELASTIC_TIMEOUT_S, "--host-discovery-script", script]
    if line.slots_per_host is not None:
        words += ["--slots-per-host", str(line.slots_per_host)]
    if line.cooldown is not None:
        words += ["--host-cooldown", line.cooldown]
    return words


def _check_range(line: _Line) -> None:
    """Workers come and go between the two bounds: survivors go on, and lost ones are replaced."""
    line.env["HOROVOD_ELASTIC"] = "1"
    if line.num_proc is None:
        line.num_proc = line.least if line.least is not None else line.most
    assert line.num_proc is not None, "one of the bounds is given"
    least, most = line.least or 1, line.most or line.num_proc
    _require_between(line.num_proc, least, most)
    line.options += ["--elastic", "--min-workers", str(least), "--max-workers", str(most)]


def _require_between(start: int, least: int, most: int) -> None:
    if not least <= start <= most:
        raise InvalidArgument(
            f"-np {start} is not between --min-np {least} and --max-np {most}", hint="start a number in between"
        )


def _program(words: list[str]) -> list[str]:
    """The script, module or command: `python` before a script is left out, because `torsh run` starts Python itself."""
    if not words:
        return []
    if not _PYTHON.fullmatch(Path(words[0]).name):
        return words if words[0].endswith(".py") or Path(words[0]).is_dir() else ["--no-python", *words]
    rest = words[1:]
    while rest[:1] == ["-u"]:  # workers always run unbuffered
        del rest[0]
    if rest[:1] == ["-m"]:
        return ["--module", *rest[1:]]
    if not rest or rest[0].startswith("-"):
        return ["--no-python", *words]
    return rest
