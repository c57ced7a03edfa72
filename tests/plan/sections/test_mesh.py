"""Degrees and worlds: filling, the equation, and who gets samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.sections.refusals import expect_refusal
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import MeshConfig, Plan, TrainingConfig

degrees = st.integers(1, 6)


@given(shard=degrees, tp=degrees, pp=degrees, ep=degrees, cp=degrees, fill=degrees)
def test_the_axis_that_fills_takes_what_the_others_leave(
    shard: int, tp: int, pp: int, ep: int, cp: int, fill: int
) -> None:
    world_size = fill * shard * tp * pp * ep * cp
    resolved = MeshConfig(shard=shard, tp=tp, pp=pp, ep=ep, cp=cp).resolve(world_size)
    assert resolved == MeshConfig(dp=fill, shard=shard, tp=tp, pp=pp, ep=ep, cp=cp)
    assert math.prod(resolved.degrees.values()) == world_size
    assert resolved.data_degree == fill * shard * ep


def test_by_default_every_rank_is_a_replica() -> None:
    assert MeshConfig().resolve(6).degrees == {"dp": 6, "shard": 1, "tp": 1, "pp": 1, "ep": 1, "cp": 1}


def test_dp_is_one_where_another_axis_fills() -> None:
    assert MeshConfig(shard=-1).resolve(4) == MeshConfig(dp=1, shard=4)
    assert Plan().replace(shard=-1).mesh.dp == 1


@pytest.mark.parametrize(
    ("mesh", "world_size", "message", "hint"),
    [
        (
            MeshConfig(dp=2, tp=2),
            6,
            "dp 2 × tp 2 × pp 1 = 4, but the world has 6 ranks",
            "start 4 ranks, or set one degree of [mesh] to -1 to fill the world",
        ),
        (
            MeshConfig(dp=2, shard=4, cp=2),
            1,
            "dp 2 × shard 4 × tp 1 × pp 1 × cp 2 = 16, but the world has 1 rank",
            "start 16 ranks, or set one degree of [mesh] to -1 to fill the world",
        ),
        (
            MeshConfig(tp=4),
            6,
            "dp -1 × tp 4 × pp 1 cannot fill the world of 6 ranks: 4 does not divide 6",
            "start a multiple of 4 ranks, or lower the other degrees",
        ),
        (
            MeshConfig(tp=4),
            2,
            "dp -1 × tp 4 × pp 1 cannot fill the world of 2 ranks: 4 does not divide 2",
            "start a multiple of 4 ranks, or lower the other degrees",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_shows_the_whole_equation(
    mesh: MeshConfig, world_size: int, message: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mesh.resolve(world_size)
    assert caught.value.message == message
    assert caught.value.hint == hint


def test_only_one_axis_fills() -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.dp and mesh\.tp are both -1, but only one axis"):
        MeshConfig(dp=-1, tp=-1)


@pytest.mark.parametrize("degree", [0, -2, True, 1.0, "2"])
def test_a_degree_is_a_number_of_ranks(degree: object) -> None:
    with pytest.raises(
        ConfigurationError, match="tp must be a number of ranks, at least 1, or -1 to fill the world; got"
    ):
        MeshConfig(tp=degree)  # type: ignore[arg-type]


def test_a_batch_with_too_few_samples_is_refused_with_the_numbers() -> None:
    plan = Plan(training=TrainingConfig(batch_size=10, gradient_accumulation=3))
    plan.validate(3)
    with pytest.raises(ConfigurationError) as caught:
        plan.validate(4)
    assert caught.value.message == (
        "plan: training.batch_size 10 is below data-parallel degree 4 × training.gradient_accumulation 3 = 12"
    )
    assert caught.value.hint == "raise training.batch_size: every pass of every rank needs at least one sample"


def test_resolving_a_plan_keeps_everything_else() -> None:
    plan = Plan(tp=2, training=TrainingConfig(steps=7))
    assert plan.resolve(8) == Plan(dp=4, tp=2, training=TrainingConfig(steps=7))
    assert plan.resolve(8).explain()["mesh.dp"].source == "default"


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"schedule": "zbv_zero_bubble"},
            "pipeline.stages_per_rank is 1, but pipeline.schedule zbv_zero_bubble holds exactly 2 on each rank",
            "set pipeline.stages_per_rank = 2, or choose another schedule",
            id="v-shaped-needs-two-stages",
        ),
        pytest.param(
            {"schedule": "interleaved_one_f_one_b"},
            (
                "pipeline.stages_per_rank is 1, but pipeline.schedule interleaved_one_f_one_b holds at least 2 on"
                " each rank"
            ),
            "set pipeline.stages_per_rank = 2, or choose another schedule",
            id="interleaved-needs-several-stages",
        ),
        pytest.param(
            {"stages_per_rank": 2},
            "pipeline.stages_per_rank is 2, but pipeline.schedule one_f_one_b holds exactly 1 on each rank",
            "set pipeline.stages_per_rank = 1, or choose another schedule",
            id="1f1b-needs-one-stage",
        ),
        pytest.param(
            {"split_points": ["layers.4"]},
            'pipeline.split_points and pipeline.balance = "manual" go together, but only one is set',
            "set both, or neither",
            id="split-points-without-manual",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"pipeline": keys}, message, hint)
