"""README stays a page, and its figures are those of the benchmarks."""

from __future__ import annotations

import re

import pytest

from benchmarks.result import load_result
from benchmarks.wording import quantity, ratio
from tests.docs.blocks import ROOT

README = (ROOT / "README.md").read_text()
FIGURES = re.findall(r"^\| (.+) \| (.+) \| (.+) \| ([\d.]+×) \| (\w+) \|$", README, re.MULTILINE)


def test_it_is_a_page() -> None:
    assert len(README.splitlines()) <= 80


def test_it_has_six_figures() -> None:
    assert len(FIGURES) == 6


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure[4])
def test_a_figure_is_the_one_that_was_measured(figure: tuple[str, ...]) -> None:
    _, ours, theirs, factor, case = figure
    result = load_result(ROOT / "benchmarks" / "results" / f"{case}.json")
    measured = {
        (quantity(row.ours.median, row.unit), quantity(rival.median, row.unit), ratio(row, name))
        for row in result.rows
        for name, rival in row.rivals.items()
    }
    assert (ours, theirs, factor) in measured
