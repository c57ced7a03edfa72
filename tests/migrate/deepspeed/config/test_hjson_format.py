"""HJSON: all of JSON, and what people write instead."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.config_kinds import translate_config
from torsh_distributed.migrate.deepspeed.config.hjson_format import parse_hjson
from torsh_distributed.plan.reading.limits import MalformedError

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_DOCUMENTS = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@settings(max_examples=40)
@given(_DOCUMENTS, st.sampled_from([None, 2]))
def test_json_is_hjson(document: Any, indent: int | None) -> None:
    assert parse_hjson(json.dumps(document, indent=indent)) == document


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# a comment\n{ a: 1 // one\n /* two */ b: 2 }", {"a": 1, "b": 2}),
        ("a: 1\nb: two words\nc: [1, 2,]", {"a": 1, "b": "two words", "c": [1, 2]}),
        (
            "{lr: 1e-3, size: 5e8, on: true, path: /tmp/x y # z\n}",
            {"lr": 1e-3, "size": 5e8, "on": True, "path": "/tmp/x y # z"},
        ),
        ("{'a': 'it', \"b\": \"a\\u00e9\\n\"}", {"a": "it", "b": "aé\n"}),
        ("{\n  a:\n  '''\n  one\n    two\n  '''\n}", {"a": "one\n  two"}),
        ("{}", {}),
        ("[1\n2]", [1, 2]),
        ("{a: 1\r\n b: null}", {"a": 1, "b": None}),
        ("a: '''one'''", {"a": "one"}),
        ('{"a": NaN\n}', {"a": "NaN"}),
    ],
)
@pytest.mark.needs_library("hjson")
def test_what_people_write(text: str, expected: Any) -> None:
    assert parse_hjson(text) == expected


@pytest.mark.parametrize(
    ("text", "reason", "where"),
    [
        ("{a: 1, a: 2}", "the key a is given twice", ""),
        ('{"a": 1, "a": 2}', "the key a is given twice", ""),
        ("{\n  a: 1\n", "Bad key name (eof)", ", line 3, column 1"),
        ("[1, 2", "Expecting value", ", line 1, column 6"),
        ('{"a: 1}', "Unterminated string", ", line 1, column 2"),
        ("{a 1}", "where a key name was expected", ", line 1, column 2"),
        ("/* {}", "a comment does not end", ""),
        ("a: 1e999", "a number is too large", ""),
        ("{} x", "Extra data", ", line 1, column 4"),
        ("{a: }", "Found a punctuator character", ", line 1, column 5"),
        ("[" * 100 + "]" * 100, "nested more than 16 levels deep", ""),
        ("[" * 60_000, "nested too deeply", ""),
        ("{a: " + "1" * 1000 + "}", "more than 400 digits", ", line 1, column 5"),
        ('{"a": "\\q"}', "Invalid \\X escape sequence 'q'", ", line 1, column 9"),
    ],
)
@pytest.mark.needs_library("hjson")
def test_what_is_wrong_is_said_with_its_place(text: str, reason: str, where: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_hjson(text)
    assert reason in caught.value.reason
    assert caught.value.where == where


@pytest.mark.timeout(20)
@pytest.mark.needs_library("hjson")
def test_digits_that_would_keep_the_package_busy_are_refused_first() -> None:
    with pytest.raises(MalformedError, match="more than 400 digits"):
        parse_hjson("a: " + "1" * 32_000 + " x" + "," * 32_000)


def test_json_is_read_without_the_package_and_the_rest_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert parse_hjson('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    with pytest.raises(FeatureNotAvailable, match=r"not JSON \(.* line 2") as caught:
        parse_hjson("{\n# a comment\n}")
    assert "torsh-distributed[hjson]" in str(caught.value)
    config = tmp_path / "ds_config.json"
    config.write_text("{ // batch\n train_batch_size: 4 }")
    with pytest.raises(FeatureNotAvailable, match="HJSON"):
        translate_config(config)
