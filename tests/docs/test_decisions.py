"""Decision records: each has a title, a date and a status, and a line in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
_HEAD = re.compile(
    r"# (?P<number>\d+)\. (?P<title>.+)\n\n"
    r"Date: (?P<date>\d{4}-\d\d-\d\d)\. Status: (?P<status>accepted|(?:accepted, amended|superseded) by .+)\.\n\n"
)
_LINK = re.compile(r"\[(\d+)\]\((\d{4}-[\w-]+\.md)\)")


def head_of(record: Path) -> re.Match[str]:
    found = _HEAD.match(record.read_text())
    assert found, f"{record.name} begins with `# N. Title`, then `Date: YYYY-MM-DD. Status: accepted.`"
    return found


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_begins_with_number_title_date_and_status(record: Path) -> None:
    head = head_of(record)
    assert int(head["number"]) == int(record.name[:4])
    others = _LINK.findall(head["status"])
    assert bool(others) == (head["status"] != "accepted")
    for number, name in others:
        assert (FOLDER / name).exists()
        assert int(number) == int(name[:4])


def test_the_index_has_a_line_for_every_record_with_its_title_date_and_status() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    shown = [re.split(r" \| ", row.strip("| ")) for row in rows]
    expected = [
        [f"[{head['number']}]({record.name})", head["title"], head["date"], head["status"]]
        for record, head in ((record, head_of(record)) for record in RECORDS)
    ]
    assert [[number, title, date, status] for number, title, _, date, status in shown] == expected
    assert all(line.endswith(".") for _, _, line, _, _ in shown)
