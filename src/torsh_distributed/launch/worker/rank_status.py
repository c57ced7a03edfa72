"""What a rank says about itself, as the launcher keeps it: read from its messages, checked, and sent to the leader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import MaxLen

Text = Annotated[str, MaxLen(4_000)]
"""A text that travels between launchers."""
_MAX_LINES = 64
_MAX_RECORDS = 32
_MAX_GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class RaisedError:
    """An exception of a rank."""

    how: Text = "uncaught"
    """uncaught, exit (sys.exit while it was handled), leaving (a group was destroyed meanwhile) or thread."""
    kind: Text
    message: Text = ""
    where: Text | None = None
    """`train.py:42 in step`: the user's own line."""
    traceback: tuple[Text, ...] = ()
    """With library frames folded."""
    is_consequence: bool = False
    """Whether it only says that another rank is gone or late."""
    peers: tuple[int, ...] = ()
    """The ranks it names."""
    operation: Text | None = None
    sequence: int | None = None
    exit_code: int = 1
    at_s: float = 0.0
    """Wall-clock time of the report."""

    @property
    def is_fatal(self) -> bool:
        """Whether it ends the process."""
        return self.how in ("uncaught", "exit")

    @property
    def summary(self) -> str:
        """`ValueError: bad batch`, in one line."""
        first = self.message.strip().partition("\n")[0]
        return f"{self.kind}: {first}" if first else self.kind


@dataclass(frozen=True, kw_only=True)
class WaitingCall:
    """The operation a rank waits in."""

    op: Text
    group: Text | None = None
    """None if it was not recorded: a call of torch's on a backend of its own."""
    is_world: bool = True
    sequence: int | None = None
    num_bytes: int | None = None
    members: tuple[int, ...] | None = None
    peer: int | None = None
    age_s: float = 0.0
    at: Text | None = None

    @property
    def shown(self) -> str:
        """`all_reduce #118 on group 3`."""
        number = "" if self.sequence is None else f" #{self.sequence}"
        return f"{self.op}{number}" + ("" if self.is_world or self.group is None else f" on group {self.group}")


@dataclass(frozen=True, kw_only=True)
class SeenOperation:
    """One record of a rank's flight recorder."""

    sequence: int
    op: Text
    num_bytes: int
    peer: int | None = None
    at: Text | None = None
    is_ended: bool = True


@dataclass(frozen=True, kw_only=True)
class GroupHistory:
    """The latest operations of a rank on one group, oldest first."""

    members: tuple[int, ...] | None = None
    is_world: bool = True
    operations: tuple[SeenOperation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank does at one moment."""

    rank: int
    node_rank: int = 0
    node_name: Text = ""
    pid: int | None = None
    step: int | None = None
    checkpoint_step: int | None = None
    waiting: WaitingCall | None = None
    groups: dict[str, GroupHistory] = field(default_factory=dict)
    stack: tuple[Text, ...] = ()
    handling: Text | None = None
    """The exception in whose `except` block it is."""
    threads: tuple[Text, ...] = ()
    """Where the user's other threads are."""
    native: Text | None = None
    """What it does below Python, as the kernel says."""
    silence: Text | None = None
    """Why it did not answer: stopped, busy in native code, or without a line; None if it did."""
    raised: RaisedError | None = None
    """The latest exception it reported, which may have been handled since."""
    has_finished: bool = False
    """Whether its script came to its end without an error; the process may take a moment to follow."""

    @property
    def whereabouts(self) -> str:
        """What keeps its process from ending, once the script has: in words."""
        if self.silence is not None:
            return self.silence
        if self.threads:
            return f"thread {'; thread '.join(self.threads)}"
        frame = next((line.strip() for line in reversed(self.stack) if line.lstrip().startswith("File ")), None)
        return f"it is at {frame}" if frame is not None else "it does not say where it is"

    def last_sequence(self, group: str) -> int:
        """The number of the latest operation it has begun on a group; 0 if none is known."""
        history = self.groups.get(group)
        return max((one.sequence for one in history.operations), default=0) if history is not None else 0


def raised_from(message: Mapping[str, Any]) -> RaisedError | None:
    """The exception in a message of a worker; None if the message is not sound."""
    try:
        return RaisedError(
            how=_text(message["how"]),
            kind=_text(message["kind"]),
            message=_text(message["message"]),
            where=_maybe_text(message.get("where")),
            traceback=_lines(message.get("traceback")),
            is_consequence=message.get("is_consequence") is True,
            peers=_numbers(message.get("peers")) or (),
            operation=_maybe_text(message.get("operation")),
            sequence=_number(message.get("sequence")),
            exit_code=_number(message.get("exit_code")) or 1,
            at_s=float(message["at_s"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def status_from(rank: int, message: Mapping[str, Any]) -> RankStatus | None:
    """The status in a message of a worker; None if the message is not sound."""
    try:
        blocked = message.get("blocked")
        waiting = None
        if blocked is not None:
            waiting = WaitingCall(
                op=_text(blocked["op"]),
                group=_maybe_text(blocked.get("group")),
                is_world=blocked.get("is_world") is True,
                sequence=_number(blocked.get("sequence")),
                num_bytes=_number(blocked.get("num_bytes")),
                members=_numbers(blocked.get("members")),
                peer=_number(blocked.get("peer")),
                age_s=float(blocked["age_s"]),
                at=_maybe_text(blocked.get("at")),
            )
        groups = {_text(name): _history(found) for name, found in list(message["groups"].items())[:_MAX_GROUPS]}
        return RankStatus(
            rank=rank,
            waiting=waiting,
            groups=groups,
            stack=_lines(message.get("stack")),
            handling=_maybe_text(message.get("handling")),
            threads=_lines(message.get("threads")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _history(found: Mapping[str, Any]) -> GroupHistory:
    return GroupHistory(
        members=_numbers(found.get("members")),
        is_world=found.get("is_world") is True,
        operations=tuple(
            SeenOperation(
                sequence=int(sequence),
                op=_text(op),
                num_bytes=int(num_bytes),
                peer=_number(peer),
                at=_maybe_text(at),
                is_ended=ended is True,
            )
            for sequence, op, num_bytes, peer, at, ended in found["records"][-_MAX_RECORDS:]
        ),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text was expected")
    return value[:4_000]


def _maybe_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _lines(value: Any) -> tuple[str, ...]:
    return tuple(_text(line) for line in (value or [])[:_MAX_LINES])


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _numbers(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(one) for one in value)
