"""The mechanism is general: architectures that no code here names train as one process does, or are refused."""

from __future__ import annotations

import pytest

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from tests.parallel.models.further import FAMILIES, train_further

pytestmark = [pytest.mark.needs_library("transformers"), pytest.mark.matrix]

IN_A_STEP = ("ended the group", "was aborted", "could not run stage")
"""What a refusal says that comes too late: the first step has begun."""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_that_nobody_looked_at_is_equal_or_refused_on_every_axis(world: World, family: str) -> None:
    said = world.run(train_further, family, num_ranks=2, backend="torsh", timeout_s=110, imports=TRANSFORMERS)
    assert said[0].keys() == said[1].keys()
    assert "equal" in said[0].values()
    for verdicts in said:
        for axis, verdict in verdicts.items():
            assert verdict == "equal" or verdict.startswith("refused: "), (axis, verdict)
            assert not any(late in verdict for late in IN_A_STEP), (axis, verdict)
