"""The records that launchers exchange: plain dataclasses that travel as JSON, checked field by field on arrival.

Nodes speak to the leader (node 0) and the leader to all nodes. A job on one node uses the same records without a
connection, so one node is not a special case; only what crosses a connection needs pydantic, which is slow to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from torsh_distributed.errors import SerializationError, first_line
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.worker.rank_status import (
    GroupHistory,
    RaisedError,
    RankStatus,
    SeenOperation,
    Text,
    WaitingCall,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_MAX_DETAIL_CHARS = 500


def _read_words(message: Mapping[str, Any], numbers: Mapping[str, object]) -> tuple[str, str] | None:
    """What a message says and its detail, cut to a length; None if malformed: it comes from a script's process."""
    what = message.get("what")
    if not isinstance(what, str) or not all(isinstance(number, int) for number in numbers.values()):
        return None
    return what, str(message.get("detail", ""))[:_MAX_DETAIL_CHARS]


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A node asks to join; the leader compares what must be equal on all nodes."""

    kind: Literal["join_request"] = "join_request"
    node_rank: int
    node_name: Text
    nnodes: int
    nproc_per_node: int
    max_restarts: int
    run_id: Text
    python: Text
    torch: Text
    torsh: Text
    clock_s: float
    """Wall-clock time there."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A worker of the node failed, one record for each; the node waits for the leader's decision."""

    kind: Literal["failed"] = "failed"
    attempt: int
    failure: EndReport


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A worker of the node ended with exit code 0; others may still need it."""

    kind: Literal["ended"] = "ended"
    attempt: int
    worker: EndReport


@dataclass(frozen=True, kw_only=True)
class Said:
    """A worker of the node says what it does: because it was asked, or because it waits unusually long."""

    kind: Literal["said"] = "said"
    attempt: int
    status: RankStatus
    is_asked: bool


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All workers of the node succeeded."""

    kind: Literal["finished"] = "finished"
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """No process of that attempt is left on the node."""

    kind: Literal["stopped"] = "stopped"
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Unable:
    """The node cannot start the workers of an attempt, and no restart would help."""

    kind: Literal["unable"] = "unable"
    attempt: int
    failure: EndReport


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a worker of the node measured: its message, as JSON. It decides nothing."""

    kind: Literal["measured"] = "measured"
    rank: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """The user ended the job with a signal to the launcher of the node."""

    kind: Literal["interrupted"] = "interrupted"
    signal: int


@dataclass(frozen=True, kw_only=True)
class MemberSaid:
    """A worker of an elastic job tells where it is: ready, join, entered, stepped or leaving; how it is (health); how
    many workers it wants (scale)."""

    kind: Literal["member_said"] = "member_said"
    attempt: int
    member: int
    what: Text
    epoch: int = 0
    step: int = 0
    workers: int = 0
    detail: Text = ""

    @classmethod
    def read(cls, attempt: int, member: int, message: Mapping[str, Any]) -> Self | None:
        """What a worker said in these words; None if no worker says that."""
        numbers = {name: message.get(name, 0) for name in ("epoch", "step", "workers")}
        said = _read_words(message, numbers)
        if said is None:
            return None
        return cls(attempt=attempt, member=member, what=said[0], detail=said[1], **numbers)


@dataclass(frozen=True, kw_only=True)
class ChangeWanted:
    """A rule of alerts on the node asks for a change of the plan; `change` is JSON."""

    kind: Literal["change_wanted"] = "change_wanted"
    change: Text
    reason: Text


@dataclass(frozen=True, kw_only=True)
class ChangeSaid:
    """A worker's answer to change `number` of the plan: ready (to stop before update `at`), changed or refused."""

    kind: Literal["change_said"] = "change_said"
    attempt: int
    member: int
    number: int
    what: Text
    at: int = 0
    step: int = 0
    detail: Text = ""

    @classmethod
    def read(cls, attempt: int, member: int, message: Mapping[str, Any]) -> Self | None:
        """What a worker answered in these words; None if they are not an answer."""
        numbers = {name: message.get(name, 0) for name in ("number", "at", "step")}
        said = _read_words(message, numbers)
        if said is None:
            return None
        return cls(attempt=attempt, member=member, what=said[0], detail=said[1], **numbers)


@dataclass(frozen=True, kw_only=True)
class WorkersWanted:
    """The policy on energy of node 0 says how many workers train from now on; with none, all hold for `longest_s` at
    most."""

    kind: Literal["workers_wanted"] = "workers_wanted"
    workers: int
    reason: Text
    longest_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DiagnosisWanted:
    """Somebody at the node asks what the job is doing (SIGUSR1); node 0 prints the answer."""

    kind: Literal["diagnosis_wanted"] = "diagnosis_wanted"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A sign of life, in both directions."""

    kind: Literal["heartbeat"] = "heartbeat"


@dataclass(frozen=True, kw_only=True)
class JoinAccepted:
    """The leader accepts the node. `log_name` is the run's directory name under --log-dir, the same on all nodes."""

    kind: Literal["join_accepted"] = "join_accepted"
    log_name: Text


@dataclass(frozen=True, kw_only=True)
class JoinRefused:
    """The leader does not accept the node."""

    kind: Literal["join_refused"] = "join_refused"
    reason: Text


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start the workers of an attempt, which meet in the attempt's own store."""

    kind: Literal["start"] = "start"
    attempt: int
    master_addr: Text
    master_port: int
    local_store: Text = ""
    """Where workers on the leader's node reach the store without the network; empty if they cannot."""
    machine_interval_s: float | None = None
    """Seconds between readings of a node's sensors, if the workers are to measure; None if nobody looks."""
    workers_by_node: tuple[int, ...] = ()
    """Workers on each node, where a host discovery script says how many; empty for those of the job."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Ask every worker of the attempt what it does; each is told about with `Said`."""

    kind: Literal["ask"] = "ask"
    attempt: int


@dataclass(frozen=True, kw_only=True)
class ChangeMembers:
    """The world of an elastic job has other members from now on, in the order of their ranks."""

    kind: Literal["change_members"] = "change_members"
    attempt: int
    epoch: int
    members: tuple[int, ...]
    is_urgent: bool
    leaving: tuple[int, ...] = ()
    is_held: bool = False
    """They are too few, and wait for the next change."""


@dataclass(frozen=True, kw_only=True)
class ForgetWorkers:
    """An elastic job goes on without these workers: they are ended, and their end fails nothing."""

    kind: Literal["forget_workers"] = "forget_workers"
    attempt: int
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AddWorker:
    """Start a worker on one node that will ask to join."""

    kind: Literal["add_worker"] = "add_worker"
    attempt: int
    member: int
    node_rank: int


@dataclass(frozen=True, kw_only=True)
class ChangePlan:
    """Change `number` of the plan: prepare, commit (before update `at`), cancel, or release from its hold; `change` is
    JSON."""

    kind: Literal["change_plan"] = "change_plan"
    attempt: int
    number: int
    what: Text
    at: int = 0
    change: Text = "{}"
    reason: Text = ""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End the workers of an attempt and report when they are gone; the next attempt follows."""

    kind: Literal["stop"] = "stop"
    attempt: int
    failure: EndReport


@dataclass(frozen=True, kw_only=True)
class End:
    """The job is over: end all workers and exit with this code."""

    kind: Literal["end"] = "end"
    exit_code: int
    failure: EndReport | None = None
    signal: int | None = None
    """The user's signal, to be forwarded to workers that still run; None ends them as after a failure."""


FromNode = (
    JoinRequest
    | Failed
    | Ended
    | Said
    | Finished
    | Stopped
    | Unable
    | Measured
    | ChangeWanted
    | ChangeSaid
    | WorkersWanted
    | DiagnosisWanted
    | Interrupted
    | MemberSaid
    | Heartbeat
)
FromLeader = (
    JoinAccepted
    | JoinRefused
    | Start
    | Ask
    | ChangeMembers
    | ForgetWorkers
    | AddWorker
    | ChangePlan
    | Stop
    | End
    | Heartbeat
)
Message = FromNode | FromLeader


@cache
def _adapter() -> TypeAdapter[Any]:
    """What turns records into JSON and back; a key that the record does not have is an error."""
    from pydantic import ConfigDict, Field, TypeAdapter, with_config

    nested = (EndReport, RaisedError, RankStatus, WaitingCall, GroupHistory, SeenOperation)
    for record in (*nested, *FromNode.__args__, *FromLeader.__args__):
        with_config(ConfigDict(extra="forbid"))(record)
    return TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def prepare_records() -> None:
    """Import and build what records need, before anybody waits for one: on a busy machine it takes a second."""
    decode(encode(Heartbeat()))


def encode(message: Message) -> bytes:
    """The record as JSON."""
    return _adapter().dump_json(message)


def decode(data: bytes) -> Message:
    """The record in `data`, which came from elsewhere; raises SerializationError if it is not one of these."""
    from pydantic import ValidationError

    try:
        message: Message = _adapter().validate_json(data, strict=True)
    except ValidationError as error:
        raise SerializationError(
            "a record from another launcher is not understood",
            hint="run the same version of torsh-distributed on every node",
            reason=first_line(error),
            num_bytes=len(data),
        ) from None
    return message
