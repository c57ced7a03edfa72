"""HJSON: all of JSON, and what people write instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_distributed.migrate.deepspeed.config.hjson_format import parse_hjson
from torsh_distributed.plan.reading.malformed import MalformedError

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
    ],
)
def test_what_people_write(text: str, expected: Any) -> None:
    assert parse_hjson(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{a: 1, a: 2}", "the key a is given twice"),
        ("{a: 1", "an object does not end"),
        ("[1, 2", "a list does not end"),
        ('{"a: 1}', "text in quotes does not end"),
        ("{a 1}", "is not followed by a colon"),
        ("/* {}", "a comment does not end"),
        ("{} x", "the document ends before"),
        ("{a: }", "a value is expected"),
        ("[" * 100, "nested too deeply"),
        ("{a: " + "1" * 1000 + "}", "more than 400 digits"),
        ('{"a": "\\q"}', "is not an escape"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_hjson(text)
    assert reason in caught.value.reason
    assert "line" in caught.value.where
