"""Who trains with a server, what each of them has pushed, and who has to wait for whom. Pure: it sends nothing.

Everything here is kept with the parameters, in one record, so a server that was killed knows exactly which pushes are
in its parameters.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc.serving.exposed import sendable

_KINDS = ("bsp", "bounded", "async")


@sendable
@dataclass(frozen=True, kw_only=True, slots=True)
class Consistency:
    """How far workers may be apart."""

    kind: Literal["bsp", "bounded", "async"] = "bsp"
    """bsp: a step is taken with the mean of one push of every worker, which is the step of the joint batch.
    bounded: every push is a step, and who is too far ahead of the slowest waits. async: nobody waits."""

    staleness: int = 0
    """For bounded: how many pushes a worker may be ahead of the slowest."""

    num_workers: int = 1
    """For bsp and bounded: no step before as many workers have joined. Later they come and go."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or self.staleness < 0 or self.num_workers < 1:
            raise InvalidArgument(
                f"a consistency is one of {', '.join(_KINDS)}, with staleness from 0 and num_workers from 1",
                kind=self.kind,
                staleness=self.staleness,
                num_workers=self.num_workers,
            )
        if self.staleness and self.kind != "bounded":
            raise InvalidArgument("staleness is for bounded consistency", kind=self.kind, staleness=self.staleness)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker: the newest of its pushes that is in the parameters, and what it was answered."""

    incarnation: int = 0
    """Grows each time the worker joins: a push of an earlier process of that name is refused."""
    sequence: int = 0
    version: int = 0
    """Of the parameters after that push."""
    clock: int = 0
    """Its pushes, counted from those of the slowest when it joined."""
    is_here: bool = False


class Rounds:
    """The members. Immutable: each method that changes something returns the next one."""

    def __init__(self, consistency: Consistency, members: dict[str, Member], num_joined: int = 0) -> None:
        self.consistency = consistency
        self._members = members
        self._num_joined = num_joined

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Rounds:
        """As `to_record` wrote it."""
        members = {name: Member(**fields) for name, fields in record["members"].items()}
        return cls(Consistency(**record["consistency"]), members, record["num_joined"])

    def to_record(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "consistency": asdict(self.consistency),
            "members": {name: asdict(member) for name, member in self._members.items()},
            "num_joined": self._num_joined,
        }

    @property
    def here(self) -> list[str]:
        """Who counts now, sorted: the order in which gradients are added."""
        return sorted(name for name, member in self._members.items() if member.is_here)

    @property
    def has_begun(self) -> bool:
        """Whether as many have joined as steps wait for."""
        return self._num_joined >= self.consistency.num_workers

    def member(self, name: str) -> Member:
        """What is known of a worker."""
        return self._members.get(name, Member())

    def joined(self, name: str) -> Rounds:
        """A worker is here from now on, with a new incarnation."""
        known = self.member(name)
        clocks = [member.clock for member in self._members.values() if member.is_here]
        fresh = replace(known, incarnation=known.incarnation + 1, is_here=True, clock=min(clocks, default=known.clock))
        return self._with({name: fresh}, self._num_joined + (known.incarnation == 0))

    def left(self, name: str) -> Rounds:
        """Nobody waits for it any more."""
        return self._with({name: replace(self.member(name), is_here=False)})

    def applied(self, names: list[str], version: int) -> Rounds:
        """The next push of each of these is in the parameters."""
        fresh = {}
        for name in names:
            known = self.member(name)
            fresh[name] = replace(known, sequence=known.sequence + 1, clock=known.clock + 1, version=version)
        return self._with(fresh)

    def _with(self, fresh: dict[str, Member], num_joined: int | None = None) -> Rounds:
        members = {**self._members, **fresh}
        return Rounds(self.consistency, members, self._num_joined if num_joined is None else num_joined)

    def is_repeated(self, name: str, incarnation: int, sequence: int) -> bool:
        """Whether this push is in the parameters already. InvalidArgument if it cannot be the worker's next one."""
        known = self.member(name)
        if not known.is_here or incarnation != known.incarnation:
            raise InvalidArgument(
                "this worker does not belong to those that train"
                + (": another process has joined under its name" if known.is_here else ": it has left, or was lost"),
                hint="make a new ParameterClient, pull, and go on",
                worker=name,
            )
        if sequence not in (known.sequence, known.sequence + 1):
            raise InvalidArgument(
                "pushes come one after the other", worker=name, sequence=sequence, applied=known.sequence
            )
        return sequence == known.sequence

    def check_version(self, name: str, base: int | None, version: int) -> None:
        """InvalidArgument if a gradient was computed from parameters that are too old."""
        if base is None or self.consistency.kind == "async":
            return
        most = 0
        if self.consistency.kind == "bounded":
            # Others may have pushed from `staleness` behind this worker to `staleness` + 1 ahead of it since it pulled.
            most = (2 * self.consistency.staleness + 1) * max(1, len(self.here) - 1)
        if version - base > most:
            raise InvalidArgument(
                f"the gradient is of version {base}, and the parameters are at version {version}",
                hint="pull, compute the gradient again and push that",
                worker=name,
                most_behind=most,
            )

    def lead(self, name: str) -> int:
        """Pushes that a worker is ahead of the slowest that is here; 0 for one that is not."""
        here = [member.clock for member in self._members.values() if member.is_here]
        return self.member(name).clock - min(here) if self.member(name).is_here else 0

    def may_go_on(self, name: str) -> bool:
        """Whether a worker's push is answered now: the slowest is close enough."""
        if self.consistency.kind != "bounded" or not self.member(name).is_here:
            return True
        return self.has_begun and self.lead(name) <= self.consistency.staleness
