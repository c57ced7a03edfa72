"""The plan of a pipeline step: which rank computes what, and when; torch's schedules on a time axis. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch.distributed.pipelining import schedules as torch_schedules

from torsh_distributed.errors import ConfigurationError, first_line
from torsh_distributed.plan.sections.mesh import PipelineConfig

CLASSES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "one_f_one_b": "Schedule1F1B",
    "interleaved_one_f_one_b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}
"""Name in a plan to torch's class."""

V_SHAPED = ("zbv_zero_bubble", "dual_pipe_v")
"""Schedules whose stages go down the ranks and up again: the first rank holds the first and the last stage."""

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; and the halves of backward: gradients of the input (I), gradients of the weights (W)."""

ActionKind = Literal["F", "B", "I", "W", "C", "U"]
"""What is drawn of a step: besides, communication that no computation hides (C), and the update (U)."""

Step = tuple[int, Kind, int]
"""Stage, kind of action, microbatch."""

DEFAULT_COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""In units of a forward: each half of backward has as many products as forward."""


@dataclass(frozen=True)
class Action:
    """One stage's work on one microbatch, from `start` to `end`."""

    rank: int
    stage: int
    kind: ActionKind
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of one step on a clock common to all ranks."""

    actions: tuple[Action, ...]
    num_ranks: int
    row_names: tuple[str, ...] = ()
    """What the ranks are called where they are drawn; left out, by their number."""
    idle_name: str = "bubble"
    """What the time without actions is called."""

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        if not self.actions:
            return 0.0
        return max(action.end for action in self.actions) - min(action.start for action in self.actions)

    @property
    def busy(self) -> float:
        """Time spent on actions, over all ranks."""
        return sum(action.end - action.start for action in self.actions)

    @property
    def costs(self) -> dict[str, float]:
        """The mean time of an action of each kind, as costs for computing a similar schedule.

        The first stage does not split backward: its "W" counts as "B", see `lay_out`.
        """
        times: dict[str, list[float]] = {}
        for action in self.actions:
            kind = "B" if action.stage == 0 and action.kind == "W" else action.kind
            if action.stage > 0 or kind != "I":
                times.setdefault(kind, []).append(action.end - action.start)
        return {kind: sum(some) / len(some) for kind, some in times.items()}

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they are idle."""
        total = self.num_ranks * self.span
        return 1 - self.busy / total if total else 0.0


def stages_of_rank(schedule: str, rank: int, *, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """The stages a pipeline rank holds: every num_ranks-th, or, V-shaped, one from each end."""
    if schedule in V_SHAPED:
        return (rank, num_stages - 1 - rank)
    return tuple(range(rank, num_stages, num_ranks))


def stage_owners(config: PipelineConfig, num_ranks: int) -> dict[int, int]:
    """Stage to the pipeline rank that holds it."""
    num_stages = num_ranks * config.stages_per_rank
    return {
        stage: rank
        for rank in range(num_ranks)
        for stage in stages_of_rank(config.schedule, rank, num_ranks=num_ranks, num_stages=num_stages)
    }


def compute_timeline(config: PipelineConfig, num_ranks: int, *, costs: Mapping[str, float] = DEFAULT_COSTS) -> Timeline:
    """The step in the schedule's order, if all actions of a kind take the same time and sending takes none."""
    return lay_out(planned_order(config, num_ranks), costs=costs)


def planned_order(config: PipelineConfig, num_ranks: int) -> dict[int, list[tuple[Step, ...]]]:
    """The steps of every rank, in the order of torch's schedule; steps in one tuple send their results together."""
    if config.schedule in _SINGLE:
        order = _SINGLE[config.schedule]
        return {
            rank: [(step,) for step in order(rank, num_ranks, config.num_microbatches)] for rank in range(num_ranks)
        }
    num_stages = num_ranks * config.stages_per_rank
    mine = stages_of_rank(config.schedule, 0, num_ranks=num_ranks, num_stages=num_stages)
    stand_ins = [_PlannedStage(index, num_stages, num_ranks) for index in mine]
    made = make_schedule(config, stand_ins, loss_fn=_no_loss)
    return {rank: list(_compute_steps(actions)) for rank, actions in made.pipeline_order.items()}


def _gpipe(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    every = range(num_microbatches)
    return [*((rank, "F", number) for number in every), *((rank, "B", number) for number in every)]


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """As torch 2.13 runs it; the order that its class reports for drawing is off by one on the last rank."""
    ahead = min(num_microbatches, num_ranks - rank)
    order: list[Step] = [(rank, "F", number) for number in range(ahead)]
    for number in range(num_microbatches):
        order.append((rank, "B", number))
        if ahead + number < num_microbatches:
            order.append((rank, "F", ahead + number))
    return order


_SINGLE = {"gpipe": _gpipe, "one_f_one_b": _one_f_one_b}


def make_schedule(config: PipelineConfig, stages: Sequence[Any], *, loss_fn: Any) -> Any:
    """Torch's schedule over this rank's stages; raises ConfigurationError for settings that torch refuses.

    `loss_fn` returns a microbatch's share of the loss: torch's own division of gradients by the number of microbatches
    would divide a parameter that two stages of a rank share twice.
    """
    kind = getattr(torch_schedules, CLASSES[config.schedule])
    is_single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    try:
        return kind(
            stages[0] if is_single else list(stages),
            n_microbatches=config.num_microbatches,
            loss_fn=loss_fn,
            scale_grads=False,
        )
    except (ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"pipeline.schedule {config.schedule}: {first_line(error)}",
            hint=f"a multiple of the pipeline's {stages[0].group_size} ranks, and at least {stages[0].num_stages},"
            " microbatches work with every schedule",
            num_microbatches=config.num_microbatches,
            num_stages=stages[0].num_stages,
        ) from error


@dataclass
class _PlannedStage:
    """What a schedule needs from a stage for planning: only numbers."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: Any = None


def _no_loss(*_: object) -> Any:
    raise AssertionError("a planned schedule is never run")


def _compute_steps(actions: Sequence[Any]) -> Iterator[tuple[Step, ...]]:
    for action in actions:
        parts = () if action is None else (getattr(action, "sub_actions", None) or (action,))
        steps = tuple(
            (part.stage_index, cast(Kind, part.computation_type.value), part.microbatch_index)
            for part in parts
            if part.computation_type.value in ("F", "B", "I", "W")
        )
        if steps:
            yield steps


def lay_out(order: Mapping[int, Sequence[tuple[Step, ...]]], *, costs: Mapping[str, float] = DEFAULT_COSTS) -> Timeline:
    """Each rank runs its steps in order, each as soon as its inputs from other stages have arrived.

    As torch runs them: a forward and a backward that a schedule pairs run one after the other, and their results are
    sent when both are done; the first stage, which sends no gradients of inputs, does all of its backward at "W".
    """
    last_stage = max((stage for groups in order.values() for steps in groups for stage, _, _ in steps), default=0)
    ends: dict[tuple[int, str, int], float] = {}
    clocks = dict.fromkeys(order, 0.0)
    left = {rank: deque(groups) for rank, groups in order.items()}
    done: list[Action] = []
    while any(left.values()):
        progressed = False
        for rank, groups in left.items():
            while groups:
                actions = _run(groups[0], rank, clocks[rank], ends, last_stage, costs)
                if actions is None:
                    break
                clocks[rank] = actions[-1].end
                ends |= {
                    (one.stage, "B" if one.kind == "I" else one.kind, one.microbatch): clocks[rank] for one in actions
                }
                done += actions
                groups.popleft()
                progressed = True
        assert progressed, "torch's schedules have no deadlock"
    return Timeline(tuple(done), len(order))


def _run(
    steps: tuple[Step, ...],
    rank: int,
    clock: float,
    ends: Mapping[tuple[int, str, int], float],
    last_stage: int,
    costs: Mapping[str, float],
) -> list[Action] | None:
    """The actions of paired steps, from `clock` on; None while it is unknown when they can start."""
    actions: list[Action] = []
    for stage, kind, microbatch in steps:
        ready = _ready(ends, stage, kind, microbatch, last_stage)
        if ready is None:
            return None
        start = max(clock, ready)
        clock = start + _cost(stage, kind, costs)
        actions.append(Action(rank, stage, kind, microbatch, start, clock))
    return actions


def _cost(stage: int, kind: Kind, costs: Mapping[str, float]) -> float:
    if stage == 0 and kind in "IW":
        return 0.0 if kind == "I" else costs["B"]
    return costs[kind]


def _ready(
    ends: Mapping[tuple[int, str, int], float], stage: int, kind: Kind, microbatch: int, last_stage: int
) -> float | None:
    """When the inputs of an action are ready; None while unknown."""
    if kind == "F":
        return 0.0 if stage == 0 else ends.get((stage - 1, "F", microbatch))
    if kind == "W":
        return ends.get((stage, "B", microbatch))
    own = ends.get((stage, "F", microbatch))
    if own is None or stage == last_stage:
        return own
    later = ends.get((stage + 1, "B", microbatch))
    return None if later is None else max(own, later)
