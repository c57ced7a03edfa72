"""Who is in the world of an elastic job, as a pure state machine: reports of workers in, decisions out.

A *member* is a worker process with a number of its own, never reused. A *view* is the members in the order of their
ranks, under an epoch that only grows: whoever holds an older epoch is out. A loss makes a view that is entered at
once; a worker that joins or leaves makes one that is entered between two steps::

    steady ──lost──────────────► entering(epoch + 1, at once)  ──all entered──► steady
      │  ▲                           │ lost: entering(epoch + 2, at once)
      │  └────────all entered────────┘
      └──a worker waits, or the target is lower──► entering(epoch + 1, between two steps) ──► …

Where fewer slots are left than the job needs, the view is *held*: who is in it stops between two steps and waits for
the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torsh_distributed.launch.spec import ElasticSpec

_MAX_FAILED_STARTS = 3
"""Replacements in a row that end before they join: then there is something wrong with the start itself."""


@dataclass(frozen=True, kw_only=True)
class NewView:
    """The world has these members from now on, in the order of their ranks."""

    epoch: int
    members: tuple[int, ...]
    is_urgent: bool
    """Enter at once, because a member is gone; otherwise between two steps."""
    lost: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    is_held: bool = False
    """Nobody enters: the members wait for the next view, because they are too few."""


@dataclass(frozen=True)
class StartMembers:
    """Start workers that will ask to join, one for each number."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class CannotContinue:
    """The members that are left cannot go on by themselves."""

    reason: str


MembershipDecision = NewView | StartMembers | CannotContinue


class Membership:
    """The members of one attempt. Every method returns the decisions to carry out, in order."""

    def __init__(self, members: Sequence[int], spec: ElasticSpec) -> None:
        self.epoch = 0
        self.members = list(members)
        self.target = len(self.members)
        """How many members are wanted; changed by `scale`."""
        self._spec = spec
        self._next_member = max(self.members, default=-1) + 1
        self._ready: set[int] = set()
        self._refusals: dict[int, str] = {}
        self._with_state: set[int] = set(self.members)
        self._starting: set[int] = set()
        self._waiting: list[int] = []
        self._outside: set[int] = set()
        self._leaving: set[int] = set()
        self._unplaced: frozenset[int] | None = None
        """Members that have no slot any more; None where a number alone says who leaves."""
        self._is_held = False
        self._finished: set[int] = set()
        self._lost: list[int] = []
        self._num_replaced = 0
        self._num_failed_starts = 0

    @property
    def is_steady(self) -> bool:
        """Whether every member has entered the latest view."""
        return not self._outside

    @property
    def running(self) -> list[int]:
        """Members that have not finished."""
        return [member for member in self.members if member not in self._finished]

    @property
    def leaving(self) -> frozenset[int]:
        """Workers that were told to leave and still run."""
        return frozenset(self._leaving)

    @property
    def is_short(self) -> bool:
        """Whether training waits for capacity."""
        return bool(self._lost) or self._is_held

    @property
    def coming(self) -> list[int]:
        """Workers that were started and have not joined yet."""
        return sorted({*self._starting, *self._waiting})

    @property
    def refusal(self) -> str | None:
        """Why the workers cannot change in place; None if they can."""
        return next((self._refusals[member] for member in self.running if member in self._refusals), None)

    @property
    def strays(self) -> list[int]:
        """Workers that came too late: all that could let them in have finished."""
        if self._with_state & set(self.running):
            return []
        return sorted({*self.running, *self._starting, *self._waiting})

    def ready(self, member: int, refusal: str | None = None) -> None:
        """A worker can go on in place when others are lost, or says why not."""
        self._ready.add(member)
        if refusal is not None:
            self._refusals[member] = refusal

    def lost(self, members: Sequence[int]) -> list[MembershipDecision]:
        """Workers ended or were given up, at the same time."""
        gone = [member for member in members if member in self.members and member not in self._finished]
        has_left_early = bool(self._leaving & set(members)) and not self.is_steady
        if self._starting & set(members):
            self._num_failed_starts += 1
        self._forget(members)
        if not gone and has_left_early and not self.is_short:
            # The world that it was about to leave does not work any more: the others cannot agree there to enter this.
            return [self._view(self.running, is_urgent=True), *self._replace()]
        if not gone:  # they had not joined yet, or had left
            starts = self._replace()
            is_final = self._spec.discovery is None
            if self._lost and is_final and not (starts or self._starting or self._waiting):
                return [CannotContinue(f"{len(self.running)} workers are left, and no other can be started")]
            return starts
        self.members = [member for member in self.members if member not in members]
        reason = self._obstacle()
        if reason is not None:
            return [CannotContinue(reason)]
        self._lost += gone
        starts = self._replace()
        return [*self._go_on(), *starts]

    def _obstacle(self) -> str | None:
        """Why the rest cannot go on in place."""
        running = self.running
        if not running:
            return "no worker is left"
        if self._spec.on_loss == "restart":
            return "on_loss is restart"
        if not self._with_state & set(running):
            return "no worker that holds the training state is left"
        unready = [member for member in running if member in self._with_state and member not in self._ready]
        if unready:
            return f"worker {unready[0]} has not begun to train"
        if self.refusal is not None:
            return self.refusal
        if len(running) < self._spec.min_workers and self._spec.on_loss == "shrink":
            return f"{len(running)} of at least {self._spec.min_workers} workers are left"
        return None

    def _go_on(self) -> list[MembershipDecision]:
        """Go on with the members there are, or wait until there are enough."""
        enough = self.target if self._spec.on_loss == "wait" else self._spec.min_workers
        if len(self.running) + len(self._waiting) < enough or self.target < self._spec.min_workers:
            return []
        joining = self._take_waiting(self.running) if len(self.running) < enough else []
        lost, self._lost = tuple(self._lost), []
        return [self._view([*self.running, *joining], is_urgent=True, lost=lost)]

    def _replace(self) -> list[MembershipDecision]:
        """Start workers for those that are missing, if the policy says so and it still helps."""
        if self._spec.on_loss not in ("replace", "wait") or self._num_failed_starts >= _MAX_FAILED_STARTS:
            return []
        missing = self.target - len(self.running) - len(self._starting) - len(self._waiting)
        missing = min(missing, self._spec.max_replacements - self._num_replaced)
        self._num_replaced += max(0, missing)
        return self._start(missing)

    def _start(self, count: int) -> list[MembershipDecision]:
        if count <= 0:
            return []
        numbers = tuple(range(self._next_member, self._next_member + count))
        self._next_member += count
        self._starting |= set(numbers)
        return [StartMembers(numbers)]

    def wants_in(self, member: int) -> list[MembershipDecision]:
        """A worker that was started has built its model and asks to join."""
        if member not in self._starting:
            return []
        self._starting.discard(member)
        self._waiting.append(member)
        if self._lost:
            return self._go_on()
        return self._settle()

    def entered(self, member: int, epoch: int) -> list[MembershipDecision]:
        """A worker is in the world of that epoch, with the state of training."""
        if epoch != self.epoch:
            return []
        self._outside.discard(member)
        if member not in self._with_state:
            self._with_state.add(member)
            self._num_failed_starts = 0
        return self._settle()

    def stuck(self, epoch: int) -> list[MembershipDecision]:
        """A worker could not enter the view, though none was lost: the same members meet again under another epoch."""
        if epoch != self.epoch or self._lost:
            return []
        return [self._view(self.running, is_urgent=True)]

    def scale(self, target: int, *, unplaced: Sequence[int] | None = None) -> list[MembershipDecision]:
        """That many members are wanted. Without `unplaced` the last ranks leave if they are too many.

        `unplaced` members have no slot any more and leave, whatever their rank; the target may then be below the least
        that the job allows, and those that are left wait.
        """
        self.target = target
        self._unplaced = None if unplaced is None else frozenset(unplaced)
        staying = [member for member in self.running if member not in (self._unplaced or ())]
        starts = self._start(target - len(staying) - len(self._starting) - len(self._waiting))
        return [*starts, *(self._go_on() if self._lost else self._settle())]

    def withdraw(self, members: Sequence[int]) -> None:
        """Workers that have not joined yet have no slot any more, and are ended."""
        self._forget(members)

    def finished(self, member: int) -> None:
        """A worker ended with exit code 0: its script came to its end, or it left."""
        self._finished.add(member)
        self._leaving.discard(member)
        self._outside.discard(member)

    def _settle(self) -> list[MembershipDecision]:
        """In a steady world: let in who waits, or let some leave; hold it if too few are left."""
        if self._lost or self._finished & set(self.members) or (self._outside and not self._is_held):
            return []
        leaving = self._surplus()
        staying = [member for member in self.members if member not in leaving]
        least = self._spec.min_workers
        if self._is_held:
            is_enough = self.target >= least and len(staying) + min(len(self._waiting), self._room(staying)) >= least
            if not is_enough:
                return [self._view(staying, is_urgent=False, leaving=leaving, is_held=True)] if leaving else []
            # At once: all of them wait, and nobody is in a step between which a state could be streamed.
            return [self._view([*staying, *self._take_waiting(staying)], is_urgent=True, leaving=leaving)]
        if leaving or self.target < least:
            is_held = min(self.target, len(staying)) < least
            return [self._view(staying, is_urgent=False, leaving=leaving, is_held=is_held)]
        joining = self._take_waiting(staying)
        if not joining:
            return []
        return [self._view([*self.members, *joining], is_urgent=False)]

    def _surplus(self) -> tuple[int, ...]:
        """Who leaves now. One stays, though it has no slot: it keeps the state until another has it."""
        if self._unplaced is None:
            return tuple(self.members[self.target :])
        leaving = [member for member in self.members if member in self._unplaced]
        return tuple(leaving[1:] if len(leaving) == len(self.members) else leaving)

    def _room(self, staying: Sequence[int]) -> int:
        placed = [member for member in staying if member not in (self._unplaced or ())]
        return max(0, min(self.target, self._spec.max_workers) - len(placed))

    def _take_waiting(self, staying: Sequence[int]) -> list[int]:
        room = self._room(staying)
        joining, self._waiting = self._waiting[:room], self._waiting[room:]
        self._ready |= set(joining)
        return joining

    def _view(
        self,
        members: Sequence[int],
        *,
        is_urgent: bool,
        lost: tuple[int, ...] = (),
        leaving: tuple[int, ...] = (),
        is_held: bool = False,
    ) -> NewView:
        """Who has been told to leave, and has not, is told so again: it may not have come to it."""
        self.epoch += 1
        self.members = list(members)
        self._outside = set(members)
        self._leaving |= set(leaving)
        self._is_held = is_held
        return NewView(
            epoch=self.epoch,
            members=tuple(members),
            is_urgent=is_urgent,
            lost=lost,
            leaving=tuple(sorted(self._leaving)),
            is_held=is_held,
        )

    def _forget(self, members: Sequence[int]) -> None:
        self._starting -= set(members)
        self._waiting = [member for member in self._waiting if member not in members]
        self._outside -= set(members)
        self._leaving -= set(members)
        self._with_state -= set(members)
