"""Ranks as a grid, and its axes: the sections `mesh`, `tensor`, `pipeline` and `context` of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.describing import AllowedValues
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


class TensorConfig(Section):
    """Choices of tensor parallelism; its degree is mesh.tp."""

    sequence_parallel: bool = False
    """Split activations along the sequence between the split layers too: less memory, the same bytes on the wire."""

    loss_parallel: bool = False
    """Compute cross-entropy on the vocabulary as split, without gathering the logits."""

    overrides: Words = ()
    """Modules that are split in another way than found: `pattern=style`, such as `model.layers.*.mlp.down_proj=row` or
    `lm_head=replicated`. Styles as `torsh plan show --model` prints them, or transformers' (`colwise`, `rowwise`)."""

    def override_styles(self) -> dict[str, str]:
        """Pattern to style."""
        return dict(self._pair(text) for text in self.overrides)

    @staticmethod
    def _pair(text: str) -> tuple[str, str]:
        pattern, _, style = text.partition("=")
        return pattern.strip(), style.strip()

    @override
    def find_problems(self) -> Iterator[Problem]:
        for text in self.overrides:
            if not all(self._pair(text)):
                yield Problem(
                    "tensor.overrides",
                    f"tensor.overrides: {text!r} is not of the form pattern=style",
                    "such as lm_head=replicated",
                )


class ContextConfig(Section):
    """Choices of context parallelism; its degree is mesh.cp."""

    form: Literal["auto", "ring", "ulysses"] = "auto"
    """How a rank's queries meet the keys of other ranks: keys and values pass around a ring, or ranks exchange
    positions for heads in an all-to-all (ulysses), for which mesh.cp must divide the heads. `auto` exchanges heads
    where they divide, except under a sliding window over 1024 positions or more, where a ring skips what is hidden."""


FILL = -1
"""The degree that takes the ranks the other axes leave."""

_ALLOWED = AllowedValues("a number of ranks, at least 1, or -1 to fill the world")

Degree = Annotated[int, Field(ge=FILL), _ALLOWED]


class MeshConfig(Section):
    """The degree of each axis: how many ways the work is split in that direction. Their product is the world size.

    One axis may be -1 and takes the ranks the others leave; `resolve(world_size)` puts the number in.
    """

    dp: Degree = FILL
    """Replicas of the model, each on its own part of the batch. Left out, it fills the world, or is 1 if another axis
    fills it."""

    shard: Degree = 1
    """Ranks over which parameters, gradients and optimizer state are sharded; each has its own part of the batch."""

    tp: Degree = 1
    """Ranks that split every layer's matrices between them (tensor parallelism). Keep it inside a node."""

    pp: Degree = 1
    """Pipeline ranks: each holds some of the layers."""

    ep: Degree = 1
    """Ranks over which the experts of mixture-of-experts layers are spread; each has its own part of the batch."""

    cp: Degree = 1
    """Ranks that split every sequence between them (context parallelism)."""

    @model_validator(mode="before")
    @classmethod
    def _let_another_axis_fill(cls, values: Any) -> Any:
        if isinstance(values, dict) and "dp" not in values and FILL in values.values():
            return {"dp": 1, **values}
        return values

    @override
    def find_problems(self) -> Iterator[Problem]:
        for axis, degree in self.degrees.items():
            if degree == 0:
                yield Problem(axis, f"mesh.{axis} must be {_ALLOWED.text}; got 0")
        filling = [axis for axis, degree in self.degrees.items() if degree == FILL]
        if len(filling) > 1:
            yield Problem(
                filling[1],
                f"{' and '.join(f'mesh.{axis}' for axis in filling)} are both -1, but only one axis can fill the world",
                "give all but one of them a number",
            )

    @property
    def degrees(self) -> dict[str, int]:
        """Axis to degree, in the order of the fields."""
        return {axis: getattr(self, axis) for axis in type(self).model_fields}

    @property
    def data_degree(self) -> int:
        """Parts into which the batch is split: every rank along dp, shard and ep gets samples of its own.

        Meaningful once no axis is -1: ask the mesh that `resolve` returned.
        """
        return self.dp * self.shard * self.ep

    @property
    def equation(self) -> str:
        """The product in words: `dp 2 × tp 2 × pp 1 = 4`. shard, ep and cp appear only if they are used."""
        used = {axis: degree for axis, degree in self.degrees.items() if degree != 1 or axis in ("dp", "tp", "pp")}
        product = " × ".join(f"{axis} {degree}" for axis, degree in used.items())
        return product if FILL in used.values() else f"{product} = {math.prod(used.values())}"

    def resolve(self, world_size: int) -> Self:
        """The same mesh for a world of `world_size` ranks, with -1 replaced by the number that fills it.

        Raises ConfigurationError with the whole equation if the degrees do not multiply to the world size.
        """
        fixed = math.prod(degree for degree in self.degrees.values() if degree != FILL)
        filling = [axis for axis, degree in self.degrees.items() if degree == FILL]
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        if filling and world_size >= fixed and world_size % fixed == 0:
            return self.replace(**{filling[0]: world_size // fixed})
        if not filling and fixed == world_size:
            return self
        if filling:
            message = f"{self.equation} cannot fill the world of {ranks}: {fixed} does not divide {world_size}"
            hint = f"start a multiple of {fixed} ranks, or lower the other degrees"
        else:
            message = f"{self.equation}, but the world has {ranks}"
            hint = f"start {fixed} ranks, or set one degree of [mesh] to -1 to fill the world"
        raise ConfigurationError(message, hint=hint, world_size=world_size)
