"""The reference page is the code's own words."""

from __future__ import annotations

from pathlib import Path

from torsh_distributed.plan import Plan
from torsh_distributed.plan.pages import render_reference
from torsh_distributed.plan.problems import keys_of

ROOT = Path(__file__).parents[3]


def test_the_page_in_the_docs_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/plan.md").read_text()
    assert page == render_reference(), "run `torsh plan reference --output docs/reference/plan.md`"


def test_every_key_has_its_row() -> None:
    page = render_reference()
    for key in keys_of(Plan):
        assert page.count(f"\n| `{key}` | ") == 1
    assert "| `training.steps` | an integer, at least 1 | `1000` | Optimizer updates in a run. | yes |" in page
