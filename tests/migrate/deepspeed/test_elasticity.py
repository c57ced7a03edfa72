"""The elastic batch: DeepSpeed's published figures, and what holds for every result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.elasticity import (
    SCHEDULER_VARIABLE,
    ElasticSettings,
    _largest_highly_composite,
    compute_elastic_config,
    elastic_batch,
    require_scheduled,
)

SECTION = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}


def config(**changes: Any) -> dict[str, Any]:
    return {"elasticity": {**SECTION, **changes}}


def test_the_example_of_deepspeeds_documentation() -> None:
    batch, sizes = compute_elastic_config(config())[:2]
    assert batch == 9792
    assert len(sizes) == 23


def test_the_micro_batch_of_a_world() -> None:
    """24 = 1 × 24, 2 × 12 and 3 × 8; the common multiple 42 is above the cap."""
    section = config(max_train_batch_size=32, micro_batch_sizes=[1, 2, 3, 7], min_gpus=1)
    assert compute_elastic_config(section, world_size=8) == (24, [1, 2, 3, 4, 6, 8, 12, 24], 3)


def test_version_two_counts_nodes() -> None:
    """Eight GPUs a node, models over two: four data parallel ranks a node."""
    section = config(version=0.2, num_gpus_per_node=8, model_parallel_size=2, min_gpus=8)
    batch, sizes, micro = compute_elastic_config(section, world_size=64)  # type: ignore[misc]  # three with a world
    assert all(size % 4 == 0 for size in sizes)
    assert 32 in sizes
    assert batch % 32 == 0
    assert micro in SECTION["micro_batch_sizes"]
    assert batch // 32 % micro == 0


def test_version_two_makes_a_batch_for_a_world_that_does_not_fit() -> None:
    section = config(version=0.2, min_gpus=1, max_gpus=200, micro_batch_sizes=[2, 4])
    batch, sizes, micro = compute_elastic_config(section, world_size=193)  # type: ignore[misc]  # three with a world
    assert (batch, sizes, micro) == (9650, [193], 2)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
    st.integers(40, 3000),
    st.integers(1, 20),
    st.integers(20, 400),
    st.booleans(),
)
def test_every_size_divides_the_batch_into_micro_batches(
    micro_batches: list[int], most: int, fewest_gpus: int, most_gpus: int, prefer_larger: bool
) -> None:
    settings = ElasticSettings(
        micro_batch_sizes=tuple(micro_batches),
        max_train_batch_size=most,
        min_gpus=fewest_gpus,
        max_gpus=most_gpus,
        prefer_larger_batch=prefer_larger,
        version=0.1,
    )
    try:
        found = elastic_batch(settings)
    except ConfigurationError:
        assume(False)
    assert found.train_batch_size <= most
    expected = [
        size
        for size in range(fewest_gpus, most_gpus + 1)
        if any(found.train_batch_size % (size * micro) == 0 for micro in micro_batches)
    ]
    assert list(found.world_sizes) == expected


def test_highly_composite_numbers_have_more_divisors_than_all_before() -> None:
    best, expected = 0, 1
    for number in range(1, 3000):
        count = sum(number % one == 0 for one in range(1, number + 1))
        if count > best:
            best, expected = count, number
        assert _largest_highly_composite(number) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": [1]}, "did you mean micro_batch_sizes"),
        ({"micro_batch_sizes": [0]}, "positive integers"),
        ({"micro_batch_sizes": "2"}, "positive integers"),
        ({"micro_batch_sizes": [20000]}, "are above max_train_batch_size"),
        ({"version": 0.3}, "0.3 is unknown"),
        ({"min_gpus": 5, "max_gpus": 4}, "min_gpus must be"),
        ({"model_parallel_size": 2}, "needs elasticity.version 0.2"),
        ({"version": 0.2, "model_parallel_size": 3, "num_gpus_per_node": 8}, "is not a multiple of"),
        ({"enabled": False}, "not enabled"),
    ],
)
def test_a_wrong_section_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compute_elastic_config(config(**changes))


def test_a_world_that_does_not_divide_the_batch_hears_which_do() -> None:
    with pytest.raises(ConfigurationError, match=r"128 GPUs does not divide the elastic batch of 9792"):
        compute_elastic_config(config(), world_size=128)


def test_a_required_key_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="needs micro_batch_sizes"):
        compute_elastic_config({"elasticity": {"enabled": True, "max_train_batch_size": 4}})
    with pytest.raises(ConfigurationError, match=r"0\.3\.8 or later"):
        compute_elastic_config(config(), "0.3.1")


def test_the_scheduler_and_the_run_must_agree() -> None:
    require_scheduled(SECTION, {})
    require_scheduled(SECTION, {SCHEDULER_VARIABLE: json.dumps(SECTION)})
    with pytest.raises(ConfigurationError, match="is 10000 here, but the scheduler planned with 500"):
        require_scheduled(SECTION, {SCHEDULER_VARIABLE: json.dumps({**SECTION, "max_train_batch_size": 500})})
