"""Batch sizes: any two imply the third, as in DeepSpeed; a contradiction shows the whole equation."""

from __future__ import annotations

import importlib
import itertools

import pytest

from tests.bed.real_deepspeed import use_deepspeed
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed.config.translators.batch_keys import BatchTriangle, resolve_batch

VALUES = (None, 1, 3, 4, 8, 12)
CASES = list(itertools.product(VALUES, VALUES, VALUES))


def _ours(train: int | None, micro: int | None, passes: int | None, ranks: int) -> tuple[int, int, int] | None:
    try:
        found = resolve_batch(train, micro, passes, ranks)
    except ConfigurationError:
        return None
    assert found is not None
    return found.train, found.micro, found.accumulation


def _theirs() -> list[tuple[int, int, int] | None]:
    """DeepSpeed's own, for a world of one: it takes the world size from the process group."""
    use_deepspeed()
    module = importlib.import_module("deepspeed.runtime.config")
    found: list[tuple[int, int, int] | None] = []
    for train, micro, passes in CASES:
        keys = {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": passes,
        }
        try:
            config = module.DeepSpeedConfig({name: value for name, value in keys.items() if value is not None})
        except AssertionError:
            found.append(None)
            continue
        found.append(
            (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
        )
    return found


@pytest.mark.needs_deepspeed
def test_sizes_are_those_of_deepspeed(deepspeed_world: DeepSpeedWorld) -> None:
    (theirs,) = deepspeed_world.run_theirs(_theirs, num_ranks=1)
    assert [_ours(*case, 1) for case in CASES] == theirs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 4, 2), (32, 4, 2)),
        ((32, 4, None), (32, 4, 2)),
        ((32, None, 2), (32, 4, 2)),
        ((None, 4, 2), (32, 4, 2)),
        ((32, None, None), (32, 8, 1)),
        ((None, 4, None), (16, 4, 1)),
    ],
)
def test_two_sizes_imply_the_third(given: tuple[int | None, ...], expected: tuple[int, int, int]) -> None:
    assert _ours(*given, 4) == expected


@pytest.mark.parametrize("given", [(32, 4, 3), (30, 4, None), (2, None, None), (None, None, 4), (None, None, None)])
def test_a_contradiction_is_an_error(given: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigurationError):
        resolve_batch(*given, 4)


def test_the_message_has_the_whole_equation() -> None:
    with pytest.raises(ConfigurationError, match=r"32 is not .* 4 × gradient_accumulation_steps 3 × 4 .* = 48"):
        resolve_batch(32, 4, 3, 4)


def test_the_number_of_ranks_may_be_unknown() -> None:
    assert resolve_batch(32, None, None, None) is None
    assert resolve_batch(32, None, None, 2) == BatchTriangle(train=32, micro=16, accumulation=1)
