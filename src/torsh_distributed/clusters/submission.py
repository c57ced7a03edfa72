"""What a job needs, before any engine is asked for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec, Entry

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_memory(text: str) -> int:
    """Bytes of `8G`, `512M`, `1.5T`; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _FACTORS[match[2].upper()] if match is not None else 0.0
    if not 1 <= size < 2**63:
        raise InvalidArgument(f"{text!r} is not an amount of memory", hint="write it like 8G, 512M or 1.5T")
    return int(size)


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{2})(?::(\d{2}))?")


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `15m`, `12h`, `2d`, `HH:MM`, `HH:MM:SS` or `D-HH:MM:SS`."""
    number, unit = text.strip(), "s"
    if number and number[-1] in _UNITS_S:
        number, unit = number[:-1], number[-1]
    try:
        value = float(number) * _UNITS_S[unit]
    except ValueError:
        value = -1.0
    clock = _CLOCK.fullmatch(text.strip())
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        value = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not 0 < value < float("inf"):
        raise InvalidArgument(
            f"{text!r} is not a duration", hint="a positive number of seconds, or like 90s, 15m, 12h, 2d, 12:00:00"
        )
    return value


def clock_time(seconds: float) -> str:
    """The duration as SLURM and PBS take it, `D-HH:MM:SS`, rounded up."""
    whole = int(-(-seconds // 1))
    minutes, secs = divmod(whole, 60)
    hours, mins = divmod(minutes, 60)
    days, hrs = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hrs:02}:{mins:02}:{secs:02}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job as every engine takes it. What only one engine knows (a partition, a namespace) is in `options`."""

    entry: Entry
    """What every rank runs."""

    name: str
    """The job's name where the engine shows one, and its run id."""

    nodes: int = 1
    """Nodes to spread the ranks over; engines that place workers themselves take it as a wish."""

    workers_per_node: int = 1
    """Ranks on each node."""

    gpus_per_worker: int = 0
    """GPUs that each rank has to itself."""

    cpus_per_worker: int = 1
    """Cores that each rank asks for."""

    memory_per_worker: str | None = None
    """Memory that each rank asks for, as `8G`; None leaves it to the engine."""

    plan: Path | None = None
    """The plan that `td.init()` and the Engine find in TORSH_PLAN."""

    working_dir: Path = field(default_factory=Path.cwd)
    """Where the script is started; engines that carry code carry this directory."""

    env: dict[str, str] = field(default_factory=dict)
    """Variables of the ranks, on top of the job's own."""

    time_limit_s: float | None = None
    """How long the job may run; None takes the engine's own limit."""

    max_restarts: int = 0
    """How often the whole job starts again after a failure, each time from its last checkpoint."""

    elastic: ElasticSpec | None = None
    """Whether workers may come and go, where the engine can give and take them."""

    options: dict[str, str] = field(default_factory=dict)
    """The engine's own settings, as `--set key=value` gives them; an unknown one is an error."""

    def __post_init__(self) -> None:
        for key in ("nodes", "workers_per_node", "cpus_per_worker"):
            if getattr(self, key) < 1:
                raise InvalidArgument(f"{key} must be at least 1", got=getattr(self, key))
        for key in ("gpus_per_worker", "max_restarts"):
            if getattr(self, key) < 0:
                raise InvalidArgument(f"{key} must not be negative", got=getattr(self, key))
        if self.time_limit_s is not None and not 0 < self.time_limit_s < float("inf"):
            raise InvalidArgument("the time limit must be a positive number of seconds", got=self.time_limit_s)

    @property
    def num_workers(self) -> int:
        """Ranks on all nodes together."""
        return self.nodes * self.workers_per_node
