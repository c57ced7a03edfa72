"""Every mesh of a number of ranks, and the variants of a plan on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torsh_distributed.planner.model.model_profile import ModelProfile

RECOMPUTING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nothing recomputed", {"strategy": "none"}),
    ("cheap operations recomputed", {"strategy": "selective"}),
    ("every block recomputed", {"strategy": "uniform", "every_n_layers": 1}),
)
"""From the fastest to the smallest."""

SHARDING = ("shard_optimizer", "shard_grad_op", "full_shard")
"""From the fastest to the smallest."""

Mesh = dict[str, int]


def meshes(num_ranks: int, profile: ModelProfile, *, devices_per_node: int, cp: int = 1) -> Iterator[Mesh]:
    """All meshes of `num_ranks` that the model's shape allows; the simplest first.

    `cp` is as given: whether a model can run on parts of sequences is found out by running it, which needs values.
    """
    found = []
    if num_ranks % cp:
        return iter(())
    num_ranks //= cp
    for tp in _divisors(num_ranks):
        if tp > devices_per_node or (tp > 1 and profile.tensor_refusal is not None):
            continue
        for pp in _divisors(num_ranks // tp):
            if pp > max(1, profile.num_blocks):
                continue
            for ep in _divisors(num_ranks // tp // pp):
                if ep > 1 and (not profile.num_experts or profile.num_experts % ep):
                    continue
                rest = num_ranks // tp // pp // ep
                for shard in _divisors(rest):
                    axes = {"dp": rest // shard, "shard": shard, "tp": tp, "pp": pp, "ep": ep, "cp": cp}
                    found.append(axes)
    return iter(sorted(found, key=lambda axes: sum(degree > 1 for degree in axes.values())))


def pipelines(pp: int, local_batch: int) -> Iterator[dict[str, Any]]:
    """Settings of a pipeline whose ranks get `local_batch` samples each: the fewest microbatches first."""
    if pp == 1:
        yield {}
        return
    for factor in (1, 2, 4, 8):
        count = pp * factor
        if count <= local_batch:
            yield {"num_microbatches": count, "schedule": "one_f_one_b", "stages_per_rank": 1}
            yield {"num_microbatches": count, "schedule": "interleaved_one_f_one_b", "stages_per_rank": 2}


def accumulations(local_batch: int) -> Iterator[int]:
    """Numbers of passes into which a rank's samples divide evenly, the fewest first."""
    return (count for count in range(1, local_batch + 1) if local_batch % count == 0)


def even_parts(local_batch: int) -> Iterator[tuple[int, int]]:
    """Numbers of passes and samples of each for at least `local_batch` samples of a rank, the largest passes first.

    For a batch that may become a little larger: all passes have as many samples.
    """
    passes = 1
    while passes <= local_batch:
        samples = -(-local_batch // passes)
        yield passes, samples
        passes = max(passes + 1, -(-local_batch // (samples - 1)) if samples > 1 else local_batch + 1)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
