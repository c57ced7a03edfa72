"""Rows on the terminal: every one is shown, with its rivals beside or below it."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from torsh_distributed.cli.bench.rivals.rows_table import quantity, table_of_rows
from torsh_distributed.cli.bench.rivals.side_by_side import Row, RowUnit, SampleMedian


def measured(value: float) -> SampleMedian:
    return SampleMedian(median=value, low=value, high=value, num_samples=1)


@pytest.mark.parametrize("num_rivals", [1, 5])
def test_rows_without_a_rival_are_shown_too(num_rivals: int) -> None:
    rivals = {f"rival {number}": measured(2e-6) for number in range(num_rivals)}
    rows = [
        Row(name="compared", unit=RowUnit.SECONDS, ours=measured(1e-6), rivals=rivals),
        Row(name="alone", unit=RowUnit.PER_SECOND, ours=measured(5e3)),
    ]
    console = Console(width=80, record=True, file=StringIO())
    console.print(table_of_rows(rows, title="", header="what", caption=""))
    text = console.export_text()
    assert "2.00×" in text
    assert "alone" in text
    assert "5.00 k/s" in text


def test_counts_are_shown_whole() -> None:
    assert quantity(12345, RowUnit.COUNT) == "12,345"
