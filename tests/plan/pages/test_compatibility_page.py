"""The page of what goes together is the table's own answer."""

from __future__ import annotations

from pathlib import Path

from torsh_distributed.plan.compatibility.rules import RULES
from torsh_distributed.plan.pages import render_compatibility

ROOT = Path(__file__).parents[3]


def test_the_page_in_the_docs_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/compatibility.md").read_text()
    assert page == render_compatibility(), "run `torsh plan compatibility --output docs/reference/compatibility.md`"


def test_every_rule_is_there_with_its_reason_and_way_out() -> None:
    page = render_compatibility()
    for rule in RULES:
        assert page.count(f'<a id="{rule.name}">') == 1
        assert f"| {rule.reason} | {rule.way_out} |" in page


def test_a_cell_says_yes_or_names_the_rule() -> None:
    offload = next(
        line for line in render_compatibility().splitlines() if line.startswith("| offload of optimizer state |")
    )
    cells = [cell.strip() for cell in offload.strip("|").split("|")]
    assert cells[1] == "yes", "replicas"
    assert "(#offload-on-split-model)" in cells[6], "tensor"
