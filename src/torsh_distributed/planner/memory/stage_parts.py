"""Which parts of a model each pipeline rank holds, and how many microbatches of them are alive at once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.mesh import PipelineConfig
from torsh_distributed.planner.model.model_profile import ModelProfile


class StagePart(NamedTuple):
    """Some blocks of a model in a row, and whether what is before and after all blocks belongs to them."""

    first: int
    end: int
    """One behind its last block."""
    has_before: bool
    has_after: bool


def stage_parts(profile: ModelProfile, plan: Plan) -> tuple[tuple[StagePart, ...], ...]:
    """The stages of each pipeline rank; one of all blocks without a pipeline.

    As `balance = "auto"` splits: by the parameters that are multiplied with. Raises ConfigurationError where there are
    fewer blocks than stages.
    """
    if plan.mesh.pp == 1:
        return ((StagePart(0, profile.num_blocks, has_before=True, has_after=True),),)
    if len(set(profile.block_names)) < profile.num_blocks:
        raise ConfigurationError(f"{profile.name} calls the same layers more than once, so they make no pipeline")
    config = plan.pipeline
    costs = profile.stage_costs(with_tables=config.balance == "parameters")
    return _parts(costs, config.schedule, config.stages_per_rank, plan.mesh.pp)


@functools.lru_cache(maxsize=256)
def _parts(costs: tuple[float, ...], schedule: str, stages_per_rank: int, pp: int) -> tuple[tuple[StagePart, ...], ...]:
    # Here: it imports torch's schedules, which takes a second.
    from torsh_distributed.parallel.pipeline.schedule import stages_of_rank

    num_stages = pp * stages_per_rank
    starts = (*_starts(costs, num_stages), len(costs))
    parts = [
        StagePart(starts[stage], starts[stage + 1], has_before=stage == 0, has_after=stage == num_stages - 1)
        for stage in range(num_stages)
    ]
    return tuple(
        tuple(parts[stage] for stage in stages_of_rank(schedule, rank, num_ranks=pp, num_stages=num_stages))
        for rank in range(pp)
    )


@functools.lru_cache(maxsize=256)
def _starts(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    from torsh_distributed.parallel.pipeline.layer_partition import partition

    return partition(costs, num_stages)


@functools.lru_cache(maxsize=4096)
def largest_ranks(
    ranks: tuple[tuple[StagePart, ...], ...], order: tuple[int, ...], recomputed: tuple[int, ...]
) -> tuple[int, ...]:
    """The ranks one of which holds the most: of those with equal stages the first, which has the most in flight.

    For schedules whose earlier ranks run further ahead, as those have that plans are searched with.
    """
    found: dict[object, int] = {}
    for rank, parts in enumerate(ranks):
        key = tuple(
            (order[one.first : one.end], recomputed[one.first : one.end], one.has_before, one.has_after)
            for one in parts
        )
        found.setdefault(key, rank)
    return tuple(found.values())


def microbatches_in_flight(config: PipelineConfig, pp: int, rank: int) -> tuple[dict[int, int], ...]:
    """For the moments of a step when a rank has most in flight: each of its stages to the microbatches it keeps."""
    # Rounds repeat: further ones have no more in flight than the first few.
    few = min(config.num_microbatches, _ROUNDS * pp)
    if config.schedule == "one_f_one_b":
        return ({rank: min(few, pp - rank)},)
    if config.schedule == "interleaved_one_f_one_b" and few % pp == 0:
        return _interleaved_in_flight(config.stages_per_rank, pp, rank, few)
    return _in_flight(config, pp)[rank]


_ROUNDS = 3


@functools.lru_cache(maxsize=4096)
def _interleaved_in_flight(
    stages_per_rank: int, pp: int, rank: int, num_microbatches: int
) -> tuple[dict[int, int], ...]:
    """The same, of interleaved 1F1B whose microbatches are whole rounds of `pp`: a rank runs ahead, then in turns."""
    total, each_round = stages_per_rank * num_microbatches, pp * stages_per_rank
    ahead = min(total, (stages_per_rank - 1) * pp + 2 * (pp - 1 - rank))

    def stage(step: int, *, is_backward: bool) -> int:
        place = step % each_round // pp
        return rank + pp * (stages_per_rank - 1 - place if is_backward else place)

    steps = [(stage(one, is_backward=False), 1) for one in range(ahead)]
    for one in range(total):
        if ahead + one < total:
            steps.append((stage(ahead + one, is_backward=False), 1))
        steps.append((stage(one, is_backward=True), -1))
    return _most(steps)


def _most(steps: Iterable[tuple[int, int]]) -> tuple[dict[int, int], ...]:
    """The counts by stage that no other moment exceeds in every stage."""
    alive: Counter[int] = Counter()
    most: list[dict[int, int]] = []
    for stage, change in steps:
        alive[stage] += change
        if change > 0 and not any(all(one.get(key, 0) >= count for key, count in alive.items()) for one in most):
            most = [one for one in most if not all(alive[key] >= count for key, count in one.items())]
            most.append(dict(alive))
    return tuple(most)


@functools.lru_cache(maxsize=256)
def _in_flight(config: PipelineConfig, pp: int) -> tuple[tuple[dict[int, int], ...], ...]:
    from torsh_distributed.parallel.pipeline.schedule import planned_order

    order = planned_order(config, pp)
    splits = {kind for groups in order.values() for steps in groups for _, kind, _ in steps}
    ends = "W" if "W" in splits else "B"
    changes = {"F": 1, ends: -1, "B": -1}
    return tuple(
        _most((stage, changes[kind]) for steps in groups for stage, kind, _ in steps if kind in changes)
        for _, groups in sorted(order.items())
    )
