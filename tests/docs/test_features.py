"""The table of features: every row has a verdict, every name exists, and the page is what the file says."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest

import benchmarks.__main__
from tests.docs.blocks import ROOT
from tests.docs.names import Mention, problem_of

sys.path.insert(0, str(ROOT / "docs"))
try:
    features_table = importlib.import_module("features_table")
finally:
    sys.path.pop(0)

FEATURES = [feature for rows in features_table.chapters().values() for feature in rows]


def absent(name: str) -> bool:
    """Whether a name is none of the code, of the command line, of a plan or of the environment."""
    from torsh_distributed.known_variables import KNOWN
    from torsh_distributed.plan import Plan
    from torsh_distributed.plan.problems import keys_of

    if name.startswith("torsh "):
        return problem_of(Mention(features_table.PAGE, 1, name)) is not None
    if name.startswith("python -m benchmarks --"):
        return name.partition("--")[2] not in inspect.signature(benchmarks.__main__.main).parameters
    if name in KNOWN or name in keys_of(Plan):
        return False
    head, _, rest = name.partition(".")
    if head not in ("td", "torsh_distributed"):
        return True
    # From the left: each part is a name of what is before it, or a module of it.
    place, found = "torsh_distributed", importlib.import_module("torsh_distributed")
    for part in rest.split("."):
        place = f"{place}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(place)
            except ModuleNotFoundError:
                return True
        found = getattr(found, part)
    return False


def test_the_page_is_what_the_file_says() -> None:
    assert features_table.PAGE.read_text() == features_table.render(), "run: python docs/features_table.py"


def test_every_feature_has_a_verdict_that_it_proves() -> None:
    for one in FEATURES:
        assert one.verdict in features_table.VERDICTS, one
        assert one.names or one.verdict not in ("there", "partly"), f"{one.what}: by what name?"
        assert one.note or one.verdict not in ("partly", "refused"), f"{one.what}: why?"
    assert len({one.what for one in FEATURES}) == len(FEATURES)


def test_every_name_exists() -> None:
    assert [(one.what, name) for one in FEATURES for name in one.names if absent(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "td.no_such",
        "td.Plan.no_such",
        "torsh burn",
        "torsh run --tables",
        "mesh.tpp",
        "python -m benchmarks --no",
        "TORSH_NO",
        "torch.nn",
    ],
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert absent(name)
