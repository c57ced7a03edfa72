"""What `tools/mutants.py` changes, and that it tells a change that tests notice from one that they do not."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.bed.world import ROOT

TEXT = '''"""Words of 3 lines."""
def clamp(value: int | None, low=0):
    """Not 1 of these words."""
    if value < low and low > -2:
        raise ValueError(f"{value + 1} is too low by {low - 7}")
    return value + low
'''


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "mutants.py"))


def test_what_is_computed_is_changed_and_neither_texts_nor_annotations(tool: dict[str, Any]) -> None:
    found = {(mutant.line, mutant.change) for mutant in tool["mutants_of"](TEXT, "clamp.py")}
    assert found == {
        (2, "0  ->  1"),
        (4, "value < low and low > -2  ->  value < low or low > -2"),
        (4, "value < low  ->  value <= low"),
        (4, "low > -2  ->  low >= -2"),
        (4, "-2  ->  2"),
        (4, "2  ->  3"),
        (5, "raise ValueError(f'{value + 1} is too low by {low - 7}')  ->  pass"),
        (6, "value + low  ->  value - low"),
    }


def test_a_mutant_has_its_one_change_alone(tool: dict[str, Any]) -> None:
    results = set()
    for mutant in tool["mutants_of"]("answer = 3 + 4 < 7\n", "answer.py"):
        names: dict[str, Any] = {}
        exec(mutant.code, names)
        results.add((mutant.change, names["answer"]))
    assert results == {
        ("3 + 4 < 7  ->  3 + 4 <= 7", True),
        ("3 + 4  ->  3 - 4", True),
        ("3  ->  4", False),
        ("4  ->  5", False),
        ("7  ->  8", True),
    }


def test_a_module_is_tried_with_its_own_tests_first_then_with_those_of_the_nearest_folder(tool: dict[str, Any]) -> None:
    def named(path: str) -> list[str]:
        return [str(Path(one).relative_to(ROOT)) for one in tool["tests_of"](tool["SOURCE"] / path)]

    own = "tests/checkpoint/files/test_manifest.py"
    assert named("checkpoint/files/manifest.py") == [own, "tests/checkpoint/files"]
    assert named("compress/codecs/dense/quantiser.py") == ["tests/compress/codecs/dense"]


@pytest.mark.ranks
def test_the_change_is_what_the_tests_import(tool: dict[str, Any], tmp_path: Path) -> None:
    module, test = tmp_path / "halved_for_mutants.py", tmp_path / "test_halved.py"
    module.write_text("def halved(value):\n    return value // 2 if value > 0 else 0\n")
    test.write_text("from halved_for_mutants import halved\ndef test_it():\n    assert halved(6) == 3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.chdir(tmp_path)
        tests = ["-p", "no:warnings", "-c", "/dev/null", "--rootdir", str(tmp_path), str(test)]
        assert tool["run"](tests, 60.0)[0] == 0
        survivors = [
            mutant.change
            for mutant in tool["mutants_of"](module.read_text(), str(module))
            if tool["run"](tests, 60.0, module, mutant.code)[0] == 0
        ]
    assert survivors == ["value > 0  ->  value >= 0", "0  ->  1", "0  ->  1"]
