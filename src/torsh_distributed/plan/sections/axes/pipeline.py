"""How layers become stages and batches become microbatches: the `pipeline` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section, Words

STAGES_PER_RANK = {
    "gpipe": (1, 1),
    "one_f_one_b": (1, 1),
    "interleaved_one_f_one_b": (2, None),
    "looped_bfs": (2, None),
    "interleaved_zero_bubble": (2, None),
    "zbv_zero_bubble": (2, 2),
    "dual_pipe_v": (2, 2),
}
"""Schedule to the fewest and most stages that a rank may hold under it."""

SPLITS_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v")
"""Schedules that compute the gradients of inputs and of weights at different times."""


class PipelineConfig(Section):
    """The schedule of a pipeline and the cut into stages; its degree is mesh.pp."""

    num_microbatches: int = Field(default=4, ge=1)
    """Parts into which a rank's batch is split. More shrink the bubble; each must be large enough to be efficient."""

    schedule: Literal[
        "gpipe",
        "one_f_one_b",
        "interleaved_one_f_one_b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dual_pipe_v",
    ] = "one_f_one_b"
    """The order of forward and backward passes. The first two hold one stage on each rank, the others several."""

    stages_per_rank: int = Field(default=1, ge=1)
    """Stages on each rank. More shrink the bubble and send more often."""

    balance: Literal["auto", "parameters", "time", "manual"] = "auto"
    """How layers are split into stages: by estimated cost, number of parameters, measured time, or `split_points`."""

    split_points: Words = ()
    """Names of the modules that begin a new stage, for `balance = "manual"`."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        least, most = STAGES_PER_RANK[self.schedule]
        if self.stages_per_rank < least or (most is not None and self.stages_per_rank > most):
            wanted = f"exactly {least}" if least == most else f"at least {least}"
            yield Problem(
                "stages_per_rank",
                f"pipeline.stages_per_rank is {self.stages_per_rank}, but pipeline.schedule {self.schedule} holds"
                f" {wanted} on each rank",
                f"set pipeline.stages_per_rank = {least}, or choose another schedule",
            )
        if (self.balance == "manual") != bool(self.split_points):
            yield Problem(
                "split_points",
                'pipeline.split_points and pipeline.balance = "manual" go together, but only one is set',
                "set both, or neither",
            )
