"""What the plan's rules cannot know is refused by the part that reads the model, which names the key of the plan."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torsh_distributed.plan import Plan
from torsh_distributed.plan.problems import keys_of

PACKAGE = Path(__file__).parents[3] / "src" / "torsh_distributed"
KEY = re.compile(rf"\b({'|'.join(map(re.escape, keys_of(Plan)))})\b|\bkey=")


def refusals(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "ConfigurationError":
            yield call


@pytest.mark.parametrize("layer", ["parallel", "train"])
def test_a_refusal_names_the_key_of_the_plan(layer: str) -> None:
    calls = [(path, call) for path in sorted((PACKAGE / layer).rglob("*.py")) for call in refusals(path)]
    assert calls
    assert [f"{path}:{call.lineno}" for path, call in calls if not KEY.search(ast.unparse(call))] == []
