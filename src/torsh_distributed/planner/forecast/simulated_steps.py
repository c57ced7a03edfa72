"""A step of many ranks that are not equally fast: durations as arrays over all ranks, a collective waits for its group.

Means of a prediction say nothing about waiting. Here every rank has a speed of its own, every phase varies, and the
slowest of each group decides when the group goes on; 10,000 ranks are arrays of 10,000 numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from torsh_distributed.parallel.mesh.layout import MESH_ORDER
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.mesh import PipelineConfig
from torsh_distributed.planner.machine.step_time import StepPhases

if TYPE_CHECKING:
    from torsh_distributed.parallel.pipeline.schedule import ActionKind, Kind, Step


@dataclass(frozen=True, kw_only=True)
class Spreads:
    """How much ranks and phases differ, as relative standard deviations; measured, or given by the user."""

    ranks: float = 0.0
    """Between ranks, for the whole job: one is slower than another in every phase."""
    phases: float = 0.0
    """From one phase to the next, on every rank."""
    slow_ranks: float = 0.0
    """The share of ranks that are stragglers."""
    slow_by: float = 1.0
    """How many times slower a straggler computes."""


@dataclass(frozen=True)
class SimulatedSteps:
    """What some steps of all ranks took, in seconds."""

    steps_s: tuple[float, ...]
    """Each step, until its last rank is done."""
    alike_s: float
    """A step of ranks that are all alike."""
    waited: Mapping[str, float]
    """Phase to the share of all ranks' time that they waited in it for others."""
    num_ranks: int

    @property
    def mean_s(self) -> float:
        """Of all steps."""
        return float(np.mean(self.steps_s))

    @property
    def slowdown(self) -> float:
        """How much longer a step takes than if all ranks were alike."""
        return self.mean_s / self.alike_s


Doing = tuple[int | None, "ActionKind", int]
"""The place along pp (None: all of them), the kind of action and the microbatch."""


class StepObserver(Protocol):
    """Sees what ranks do in a step, as `step_picture` draws it."""

    def add(self, rank: int | None, kind: ActionKind, microbatch: int, start: np.ndarray, end: np.ndarray) -> None:
        """An action of all ranks at one place along pp, or of all ranks (None), from their clocks to their clocks."""


class SimulatedClocks:
    """The clocks of all ranks, as an array with an axis for each of the mesh."""

    def __init__(self, plan: Plan, spreads: Spreads, seed: int, record: StepObserver | None = None) -> None:
        self.shape = tuple(getattr(plan.mesh, axis) for axis in MESH_ORDER)
        self.record = record
        self.random = np.random.default_rng(seed)
        self.spreads = spreads
        self.speed = self._drawn(spreads.ranks, self.shape)
        if spreads.slow_ranks > 0:
            slow = self.random.random(self.shape) < spreads.slow_ranks
            self.speed = np.where(slow, self.speed * spreads.slow_by, self.speed)
        self.waited: dict[str, float] = {}
        self.computed = np.zeros(self.shape)
        """Seconds that each rank has computed."""

    def _drawn(self, spread: float, shape: tuple[int, ...]) -> np.ndarray:
        """Factors with mean 1: durations are above 0 and have a long tail, so their logarithms are normal."""
        if spread == 0:
            return np.ones(shape)
        sigma = np.sqrt(np.log1p(spread**2))
        return self.random.lognormal(-(sigma**2) / 2, sigma, shape)

    def compute(self, clock: np.ndarray, seconds: float, speed: np.ndarray, done: Doing) -> np.ndarray:
        """Every rank computes by itself."""
        moved: np.ndarray = clock + seconds * speed * self._drawn(self.spreads.phases, clock.shape)
        at = slice(None) if done[0] is None else slice(done[0], done[0] + 1)
        self.computed[:, at] += moved - clock
        if self.record is not None:
            self.record.add(*done, clock, moved)
        return moved

    def meet(
        self, clock: np.ndarray, axes: Sequence[str], seconds: float, name: str, rank: int | None = None
    ) -> np.ndarray:
        """Ranks that differ only along `axes` wait for each other and communicate."""
        along = tuple(MESH_ORDER.index(axis) for axis in axes)
        last = clock.max(axis=along, keepdims=True) if along else clock
        self.waited[name] = self.waited.get(name, 0.0) + float((last - clock).sum())
        begin: np.ndarray = np.broadcast_to(last, clock.shape)
        end: np.ndarray = begin + seconds
        if self.record is not None and seconds > 0:
            self.record.add(rank, "C", 0, begin, end)
        return end

    def receive(self, clock: np.ndarray, arrived: np.ndarray) -> np.ndarray:
        """A stage waits for what another one sends."""
        self.waited["stages"] = self.waited.get("stages", 0.0) + float(np.maximum(arrived - clock, 0).sum())
        met: np.ndarray = np.maximum(clock, arrived)
        return met


def simulate_steps(
    phases: StepPhases, plan: Plan, *, spreads: Spreads, num_steps: int = 10, seed: int = 0
) -> SimulatedSteps:
    """Some steps of all ranks of a plan that is resolved for its world; the same `seed` gives the same numbers."""
    ranks = SimulatedClocks(plan, spreads, seed)
    taken = [run_step(ranks, phases, plan)[0] for _ in range(num_steps)]
    alike, _ = run_step(SimulatedClocks(plan, Spreads(), seed), phases, plan)
    total = sum(taken) * float(np.prod(ranks.shape))
    waited = {name: seconds / total for name, seconds in ranks.waited.items()}
    return SimulatedSteps(tuple(taken), alike, waited, int(np.prod(ranks.shape)))


def run_step(ranks: SimulatedClocks, phases: StepPhases, plan: Plan) -> tuple[float, np.ndarray]:
    """One step of all ranks: its seconds, and when each rank had its gradients."""
    clock = np.zeros(ranks.shape)
    for number in range(plan.training.gradient_accumulation):
        clock = _one_pass(ranks, clock, phases, plan, number)
    ready = clock
    clock = ranks.meet(clock, phases.averaging_axes, phases.averaging_s, "averaging of gradients")
    clock = ranks.compute(clock, phases.update_s, ranks.speed, (None, "U", 0))
    # The next step begins with the norm of all gradients and the agreed loss: all ranks meet.
    return float(ranks.meet(clock, MESH_ORDER, 0.0, "end of the step").max()), ready


def _one_pass(ranks: SimulatedClocks, clock: np.ndarray, phases: StepPhases, plan: Plan, number: int) -> np.ndarray:
    """Forward and backward of all microbatches of an accumulated pass."""
    if plan.mesh.pp > 1:
        return _pipelined(ranks, clock, phases, plan.pipeline, plan.mesh.pp, number * plan.pipeline.num_microbatches)
    clock = _segments(ranks, clock, ranks.speed, phases, (0, "F", number))
    return _segments(ranks, clock, ranks.speed, phases, (0, "B", number))


def _pipelined(
    ranks: SimulatedClocks, clock: np.ndarray, phases: StepPhases, config: PipelineConfig, pp: int, first: int
) -> np.ndarray:
    """All microbatches through all stages, in the order of the schedule; they are counted from `first`."""
    from torsh_distributed.parallel.pipeline.schedule import planned_order

    place, per_rank = MESH_ORDER.index("pp"), config.stages_per_rank
    clocks = {rank: clock.take([rank], axis=place) for rank in range(pp)}
    speeds = {rank: ranks.speed.take([rank], axis=place) for rank in range(pp)}
    ends: dict[Step, np.ndarray] = {}
    left = {rank: deque(groups) for rank, groups in planned_order(config, pp).items()}
    while any(left.values()):
        for rank, groups in left.items():
            while groups:
                sources = [_source(step, pp * per_rank - 1) for step in groups[0]]
                if any(source is not None and source not in ends for source in sources):
                    break
                # Actions that a schedule pairs run one after the other, and send what they made when both are done.
                group, now = groups.popleft(), clocks[rank]
                for source, (stage, kind, number) in zip(sources, group, strict=True):
                    now = now if source is None else ranks.receive(now, ends[source] + phases.send_s)
                    share = _share(stage, kind) / per_rank
                    now = _segments(ranks, now, speeds[rank], phases, (rank, kind, first + number), share=share)
                clocks[rank] = now
                ends |= {
                    (stage, "F" if kind == "F" else "B", number): now for stage, kind, number in group if kind != "W"
                }
    return np.concatenate([clocks[rank] for rank in range(pp)], axis=place)


def _source(step: Step, last_stage: int) -> Step | None:
    """What an action of another stage must have ended."""
    stage, kind, number = step
    if kind == "F":
        return None if stage == 0 else (stage - 1, "F", number)
    return None if stage == last_stage or kind == "W" else (stage + 1, "B", number)


def _share(stage: int, kind: Kind) -> float:
    """How much of a stage's forward or backward an action is: half of backward is for weights, half for inputs.

    The first stage has no gradients of inputs to send: all of its backward is at "W".
    """
    if stage == 0 and kind in "IW":
        return 0.0 if kind == "I" else 1.0
    return 0.5 if kind in "IW" else 1.0


def _segments(
    ranks: SimulatedClocks, clock: np.ndarray, speed: np.ndarray, phases: StepPhases, done: Doing, *, share: float = 1.0
) -> np.ndarray:
    """A share of a rank's blocks in one direction: each computes; ranks meet where layers or pieces are split."""
    rank, kind, _ = done
    stage = phases.stages[rank or 0]
    # Where nobody is met in between, all blocks are one phase.
    count = max(1, round(stage.num_blocks * share)) if phases.block_axes else 1
    compute = (stage.forward_s if kind == "F" else stage.backward_s) * share / count
    between = (stage.forward_waits_s if kind == "F" else stage.backward_waits_s) * share / count
    for _ in range(count):
        clock = ranks.compute(clock, compute, speed, done)
        if phases.block_axes:
            clock = ranks.meet(clock, phases.block_axes, between, "blocks", rank)
    return clock
