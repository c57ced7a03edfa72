"""Engines by name: what is unknown or not installed is said, and nothing is imported before it is used."""

from __future__ import annotations

import importlib.util

import pytest

from torsh_distributed.clusters import registry
from torsh_distributed.clusters.engine_options import parse_settings
from torsh_distributed.clusters.registry import ENGINES, EngineEntry, open_engine
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument


def test_an_unknown_engine_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidArgument, match="no engine named 'slrum'") as caught:
        open_engine("slrum")
    assert "did you mean 'slurm'?" in str(caught.value)


def test_an_engine_whose_package_is_missing_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EngineEntry(home="no.module:Engine", summary="", package="no_such_package", extra="clusters")
    monkeypatch.setitem(registry.ENGINES, "far", entry)
    with pytest.raises(FeatureNotAvailable, match="needs the package 'no_such_package'") as caught:
        open_engine("far")
    assert 'pip install "torsh-distributed[clusters]"' in str(caught.value)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_says_what_it_is_and_refuses_settings_it_does_not_have(name: str) -> None:
    assert ENGINES[name].summary
    package = ENGINES[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}")
    with pytest.raises(InvalidArgument, match="no-such-setting"):
        open_engine(name, {"no-such-setting": "1"})


def test_settings_are_read_word_by_word() -> None:
    assert parse_settings(["partition=gpu", "sbatch=--mail-type=END"]) == {
        "partition": "gpu",
        "sbatch": "--mail-type=END",
    }
    for words, message in ((["partition"], "must read key=value"), (["a=1", "a=2"], "given twice")):
        with pytest.raises(InvalidArgument, match=message):
            parse_settings(words)
