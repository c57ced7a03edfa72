"""Which parts of a model each pipeline rank holds, and how many microbatches of them are alive at once."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.mesh import PipelineConfig
from torsh_distributed.planner.model.model_profile import ModelProfile


@dataclass(frozen=True)
class StagePart:
    """Some blocks of a model in a row, and whether what is before and after all blocks belongs to them."""

    first: int
    end: int
    """One behind its last block."""
    has_before: bool
    has_after: bool


def stage_parts(profile: ModelProfile, plan: Plan) -> list[list[StagePart]]:
    """The stages of each pipeline rank; one of all blocks without a pipeline.

    As `balance = "auto"` splits: by the parameters that are multiplied with. Raises ConfigurationError where there are
    fewer blocks than stages.
    """
    pp, config = plan.mesh.pp, plan.pipeline
    if pp == 1:
        return [[StagePart(0, profile.num_blocks, has_before=True, has_after=True)]]
    # Here: it imports torch's schedules, which takes a second.
    from torsh_distributed.parallel.pipeline.schedule import stages_of_rank

    num_stages = pp * config.stages_per_rank
    costs = [1.0 + block.params.numel() for block in profile.chain()]
    for around, place in ((profile.before, 0), (profile.after, -1)):
        if costs and (config.balance == "parameters" or around.forward_flops.at(1) > 0):
            costs[place] += around.params.numel()
    starts = (*_starts(tuple(costs), num_stages), profile.num_blocks)
    parts = [
        StagePart(starts[stage], starts[stage + 1], has_before=stage == 0, has_after=stage == num_stages - 1)
        for stage in range(num_stages)
    ]
    return [
        [parts[stage] for stage in stages_of_rank(config.schedule, rank, num_ranks=pp, num_stages=num_stages)]
        for rank in range(pp)
    ]


@functools.lru_cache(maxsize=256)
def _starts(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    from torsh_distributed.parallel.pipeline.layer_partition import partition

    return partition(costs, num_stages)


def microbatches_in_flight(config: PipelineConfig, pp: int, rank: int) -> list[dict[int, int]]:
    """For the moments of a step when a rank has most in flight: each of its stages to the microbatches it keeps."""
    return _in_flight(config, pp)[rank]


@functools.lru_cache(maxsize=256)
def _in_flight(config: PipelineConfig, pp: int) -> tuple[list[dict[int, int]], ...]:
    from torsh_distributed.parallel.pipeline.schedule import planned_order

    splits = {kind for groups in planned_order(config, pp).values() for steps in groups for _, kind, _ in steps}
    ends = "W" if "W" in splits else "B"
    found = []
    for _, groups in sorted(planned_order(config, pp).items()):
        alive: Counter[int] = Counter()
        most: list[dict[int, int]] = []
        for steps in groups:
            for stage, kind, _ in steps:
                if kind == "F":
                    alive[stage] += 1
                    # Only moments that no other one exceeds in every stage.
                    if not any(all(other.get(one, 0) >= count for one, count in alive.items()) for other in most):
                        most = [o for o in most if not all(alive[one] >= count for one, count in o.items())]
                        most.append(dict(alive))
                elif kind == ends or (kind == "B" and ends == "W"):
                    alive[stage] -= 1
        found.append(most)
    return tuple(found)
