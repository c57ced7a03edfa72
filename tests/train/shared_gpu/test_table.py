"""The guide's table of what was tried on one GPU is the table of the tests."""

from __future__ import annotations

from pathlib import Path

from tests.train.shared_gpu.cases import table

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "eight-ranks-on-one-gpu.md"


def test_the_guide_has_the_cases() -> None:
    inside = GUIDE.read_text().partition("<!-- cases -->\n")[2].partition("<!-- end of cases -->")[0]
    assert inside.strip() == table(), "write what `python -m tests.train.shared_gpu.cases` prints into the guide"
