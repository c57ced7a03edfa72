"""Names of higher layers: every one resolves, is used, and is written in one module."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.bed.source import PACKAGE, nodes_of, source_files, text_of
from torsh_distributed import upward

ROOT = Path(__file__).parents[1]
LISTED = {name: value for name, value in vars(upward).items() if name.isupper()}
PLACES = sorted({place for value in LISTED.values() for place in ([value] if isinstance(value, str) else value)})


def layer_of() -> dict[str, int]:
    """Each package's layer, counted from above, as the import contract has them."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return {name.strip(): index for index, line in enumerate(contract["layers"]) for name in line.split("|")}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_above_is_there(place: str) -> None:
    assert upward.load(place) is not None


@pytest.mark.parametrize("name", LISTED)
def test_a_place_above_is_used(name: str) -> None:
    texts = [text_of(path) for path in source_files() if path.name != "upward.py"]
    assert any(f"upward.{name}" in text or f"upward import {name}" in text for text in texts)


@pytest.mark.slow
def test_a_higher_layer_is_named_in_one_module() -> None:
    layers = layer_of()
    elsewhere = []
    for path in source_files():
        mine = path.relative_to(PACKAGE).with_suffix("").parts[0]
        text = text_of(path)
        if mine not in layers or mine == "upward" or "torsh_distributed." not in text:
            continue
        for node in nodes_of(path):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            words = node.value.split(":")[0].split(".")
            target = words[1] if words[0] == "torsh_distributed" and len(words) > 1 else mine
            if target != mine and layers.get(target, len(layers)) <= layers[mine]:
                elsewhere.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}")
    assert elsewhere == []
