"""Layers become stages as DeepSpeed cuts them."""

from __future__ import annotations

import importlib
import random

import pytest

from tests.bed.real_deepspeed import use_deepspeed
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.pipe.pipeline_module import (
    partition_balanced,
    partition_layers,
    partition_uniform,
)

_drawn = random.Random(0)
WEIGHTS = [[_drawn.choice([0, 1, 5, 40]) for _ in range(_drawn.randint(3, 14))] for _ in range(40)]
PARTS = [_drawn.randint(1, 5) for _ in WEIGHTS]


def _theirs() -> list[list[int]]:
    use_deepspeed()
    module = importlib.import_module("deepspeed.runtime.utils")
    return [list(map(int, module.partition_balanced(one, parts))) for one, parts in zip(WEIGHTS, PARTS, strict=True)]


@pytest.mark.needs_deepspeed
def test_balanced_parts_are_those_of_deepspeed(deepspeed_world: DeepSpeedWorld) -> None:
    (theirs,) = deepspeed_world.run_theirs(_theirs, num_ranks=1)
    assert [partition_balanced(one, parts) for one, parts in zip(WEIGHTS, PARTS, strict=True)] == theirs


def test_uniform_parts_give_the_rest_to_the_first() -> None:
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert partition_uniform(3, 3) == [0, 1, 2, 3]


def test_methods_by_name() -> None:
    names, sizes = ["Embedding", "Layer", "Layer", "Layer", "Layer", "Head"], [100, 1, 1, 1, 1, 100]
    assert partition_layers("uniform", names, sizes, 2) == [0, 3, 6]
    assert partition_layers("type:layer", names, sizes, 2) == [0, 3, 6]
    assert partition_layers("parameters", names, sizes, 3) == [0, 1, 5, 6]
    with pytest.raises(RuntimeError, match="found no valid layers"):
        partition_layers("type:conv", names, sizes, 2)
    with pytest.raises(InvalidArgument, match="not implemented"):
        partition_layers("profile", names, sizes, 2)
    with pytest.raises(AssertionError, match="do not fill"):
        partition_layers("uniform", names, sizes, 7)
