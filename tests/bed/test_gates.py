"""Every test runs in a gate: shards make up the whole, and only what has passed is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.gates import parse_shard, shard_of

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PLUGIN = "from tests.bed.gates import *\n"
FOUR = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("not here")
@pytest.fixture
def bad():
    yield
    assert False
def test_fails_in_the_end(bad): pass
"""


@given(st.sets(st.text("ab/[:", max_size=6)), st.integers(1, 9))
def test_every_test_is_in_exactly_one_shard(ids: set[str], count: int) -> None:
    shards = [shard_of(ids, number, count) for number in range(1, count + 1)]
    assert sorted(name for shard in shards for name in shard) == sorted(ids)


def test_the_cases_of_a_function_are_spread_over_the_shards() -> None:
    ids = [f"{name}[{case}]" for name in ("a.py::test_long", "b.py::test_short") for case in range(8)]
    for number in range(1, 5):
        assert [sum("long" in name for name in shard_of(ids, number, 4)), len(shard_of(ids, number, 4))] == [2, 4]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_shard(text)


def test_only_what_passed_is_left_out_of_the_next_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(FOUR)
    first = pytester.runpytest_inprocess("--passed", "passed.txt")
    first.assert_outcomes(passed=2, failed=1, skipped=1, errors=1)
    assert (pytester.path / "passed.txt").read_text().split("::")[1:] == ["test_passes\n"]
    second = pytester.runpytest_inprocess("--leave-out", "passed.txt")
    second.assert_outcomes(passed=1, failed=1, skipped=1, errors=1, deselected=1)


def test_a_gate_leaves_nothing_out_by_a_word() -> None:
    """A list of words in a gate forgets every test that none of them is in."""
    gates = (ROOT / ".ci" / "run").read_text() + (ROOT / "Makefile").read_text()
    chosen = {
        expression.strip("'\" ") for expression in re.findall(r"(?<![\w-])(?<!python )-[mk] +('[^']*'|\S+)", gates)
    }
    assert chosen - {"venv"} == {"not ranks and not slow and not matrix", "matrix"}
    assert "make matrix" in gates


def test_every_file_with_tests_is_collected() -> None:
    with_tests = {
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^(async )?def test_", path.read_text(), re.MULTILINE)
    }
    assert {path for path in with_tests if not path.name.startswith("test_")} == set()
