"""Objects travel as data: what comes back is equal, what is not known is refused, and decoding runs no code."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pathlib
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.serialization import serialize
from torsh_distributed.errors import SerializationError
from torsh_distributed.migrate.horovod.collectives.object_encoding import allow_objects, decode_object, encode_object


class Phase(enum.Enum):
    TRAIN = "train"


class Point(NamedTuple):
    x: int
    y: Any


@dataclass
class Settings:
    lr: float
    layers: list[int] = field(default_factory=list)
    phase: Phase = Phase.TRAIN

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise AssertionError("decoding must not call this")


class Meter:
    """Any class of a script."""

    def __init__(self, total: float) -> None:
        self.total = total


class Guarded:
    """A class with a say in how it is restored."""

    def __init__(self) -> None:
        self.note = "made"

    def __getstate__(self) -> dict[str, str]:
        return {"note": "kept"}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.note = state["note"] + " and restored"


@dataclass
class Cleaner:
    path: str

    def __del__(self) -> None:
        raise AssertionError("must not be built")


VALUES: list[Any] = [
    {"epoch": 3, "args": argparse.Namespace(lr=0.1, layers=[1, 2]), 4: (None, True, 2**70, 1.5, b"x", 2j)},
    [types.SimpleNamespace(a=1), range(3), slice(1, None, 2), {1, 2}, frozenset("ab"), bytearray(b"y")],
    collections.Counter("abca"),
    collections.deque([1, 2, 3], maxlen=3),
    collections.defaultdict(list, {"a": [1]}),
    [Point(1, Point(2, "x")), Settings(0.1, [3]), Phase.TRAIN],
    [torch.float16, torch.device("cpu"), torch.Size([2, 3]), pathlib.Path("a/b")],
    [datetime.datetime(2026, 1, 2, 3), datetime.date(2026, 1, 2), datetime.timedelta(days=1, seconds=2)],
    np.float32(0.5),
    np.int64(7),
    [],
    ["list", []],
    {"a": ["tensor", 0]},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_equal_and_of_their_type(value: Any) -> None:
    found = decode_object(encode_object(value))
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, collections.deque):
        assert found.maxlen == value.maxlen


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_nested_plain_values_come_back(value: Any) -> None:
    assert decode_object(encode_object(value)) == value


def test_arrays_and_tensors_come_back_inside_or_beside_the_bytes() -> None:
    state = torch.nn.Linear(2, 1).state_dict()
    value = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "state": state,
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    for tensors in (None, []):
        found = decode_object(encode_object(value, tensors), tensors)
        np.testing.assert_array_equal(found["array"], value["array"])
        assert found["array"].dtype == np.int16
        assert list(found["state"]) == ["weight", "bias"]
        assert found["state"]._metadata == state._metadata
        assert torch.equal(found["state"]["weight"], state["weight"])
        assert isinstance(found["p"], torch.nn.Parameter)
    assert len(tensors or ()) == 3


def test_other_classes_are_refused_until_the_script_allows_them() -> None:
    with pytest.raises(
        SerializationError, match=r"the object\['meter'\]\[1\] cannot be sent .* it is a .*:Meter"
    ) as caught:
        encode_object({"meter": [0, Meter(2.0)]})
    assert "allow_objects" in str(caught.value)
    with pytest.raises(SerializationError, match="it is a builtins:function"):
        encode_object(lambda: None)
    allow_objects(Meter)
    allow_objects(Guarded)
    assert decode_object(encode_object(Meter(2.0))).total == 2.0
    assert decode_object(encode_object(Guarded())).note == "kept and restored"


def test_an_object_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(SerializationError, match="contains itself"):
        encode_object(value)


@pytest.mark.parametrize(
    "message",
    [
        ["dataclass", f"{__name__}:Cleaner", [["path", "/"]]],
        ["dataclass", f"{__name__}:Settings", [["other", 1]]],
        ["dataclass", "subprocess:Popen", [["args", "ls"]]],
        ["object", "subprocess:Popen", ["dict", []]],
        ["fields", "builtins:list", [1]],
        ["fields", "os:system", ["true"]],
        ["enum", "antigravity:Phase", "TRAIN"],
        ["dtype", "load"],
        ["array", "O", [1], b"12345678"],
        ["array", "<i4", [9], b"1234"],
        ["tensor", 3, False, False],
        ["default", [], "eval"],
        ["nothing", 1],
        ["list"],
        [[]],
    ],
    ids=lambda message: str(message)[:30],
)
def test_hostile_messages_are_errors(message: Any) -> None:
    with pytest.raises(SerializationError):
        decode_object(serialize(message))


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_our_error(data: bytes) -> None:
    try:
        encoded = encode_object(decode_object(data))
    except SerializationError:
        return
    assert encode_object(decode_object(encoded)) == encoded
