"""The guide's code runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bed.world import World

GUIDE = (Path(__file__).parents[3] / "docs/guides/stores.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def run_block(number: int) -> None:
    exec(compile(BLOCKS[number], f"block {number} of stores.md", "exec"), {})


def test_the_guide_has_code() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(world: World, number: int) -> None:
    # In a process of its own: a block may leave a store open, as a script would.
    world.run(run_block, number, num_ranks=1, backend=None)
