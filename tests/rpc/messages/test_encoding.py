"""Messages, fuzzed: values come back as they were, and no head makes the reader take memory or run anything."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torsh_distributed.comm.transport.frames import BadFrame
from torsh_distributed.errors import SerializationError
from torsh_distributed.rpc.messages.decoding import open_message
from torsh_distributed.rpc.messages.encoding import TABLE_BYTES, encode
from torsh_distributed.rpc.messages.payload_files import PayloadFiles, ReceivedFiles


class NothingRegistered:
    """Plain values alone."""

    def name_of_value(self, kind: type) -> None:
        return None

    def value_class(self, name: str) -> None:
        return None

    def name_of_function(self, function: Any) -> None:
        return None

    def function(self, name: str) -> None:
        return None

    def pack_reference(self, value: Any) -> None:
        return None

    def open_reference(self, packed: Any) -> str:
        return f"reference {packed}"


REGISTRY = NothingRegistered()
TENSORS = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn]).flatmap(
    lambda dtype: st.lists(st.integers(0, 4), max_size=3).map(lambda shape: torch.ones(shape).to(dtype))
)
KEYS = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.booleans())
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=15,
)


def through(message: list[Any], *, is_file: bool = False) -> list[Any]:
    encoded = encode(message, REGISTRY)
    if is_file:
        opened, views = open_message(
            ReceivedFiles(), deque([PayloadFiles().send(encoded.parts)]), memoryview(encoded.head(is_file=True)), 0
        )
        assert views == []
        return opened.read(REGISTRY)
    opened, views = open_message(ReceivedFiles(), deque(), memoryview(encoded.head()), encoded.num_payload)
    for view, part in zip(views, encoded.parts, strict=True):
        if part:
            view[:] = part
    return opened.read(REGISTRY)


@given(value=VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = through([6, 1, value])
    assert back == [6, 1, value]


@given(tensors=st.lists(TENSORS, min_size=1, max_size=5), is_file=st.booleans())
def test_tensors_come_back_by_either_way(tensors: list[torch.Tensor], is_file: bool) -> None:
    is_file = is_file and any(tensor.numel() for tensor in tensors)
    back = through([6, 1, tensors, "x" * 70_000 * len(tensors)], is_file=is_file)[2]
    for one, other in zip(back, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.float(), other.float())
        assert one.shape == other.shape


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.array(3, dtype=np.int16),
        np.zeros((0, 4), dtype=np.float32),
        np.array([True, False]),
        np.arange(8)[::-2],
        np.frombuffer(b"read only"[:8], dtype=np.uint32),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_of_numpy_come_back_as_they_were(array: np.ndarray[Any, Any]) -> None:
    (back,) = through([6, 1, [array]])[2]
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert through([6, 1, [np.float32(0.5), np.int64(3), np.bool_(True)]])[2] == [0.5, 3, True]


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([None]), np.arange(3, dtype=">i4")])
def test_arrays_of_anything_but_numbers_are_refused_with_their_place(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(SerializationError, match=r"args\[1\]\['k'\] cannot be sent: it is a ndarray"):
        encode([1, 1, "f", 1.0, [0, {"k": array}], {}], REGISTRY)


def memory_taken(head: bytes, num_payload: int) -> int | None:
    """How much memory is taken for the payload of a head; None if the head is refused."""
    num_bytes = None
    try:
        opened, views = open_message(ReceivedFiles(), deque(), memoryview(head), num_payload)
        num_bytes = sum(map(len, views))
        opened.read(REGISTRY)
    except (BadFrame, SerializationError):
        return num_bytes
    return num_bytes


ROWS = st.lists(st.lists(st.integers(-4, 20), max_size=5), max_size=3)
HEADS = st.binary(max_size=200) | st.tuples(ROWS, st.binary(max_size=100)).map(
    lambda parts: TABLE_BYTES.pack(len(table := msgpack.packb(parts[0]))) + table + parts[1]
)


def test_a_module_is_refused_with_what_to_send() -> None:
    with pytest.raises(SerializationError, match="the result cannot be sent: it is a Linear") as caught:
        encode([6, 1, torch.nn.Linear(1, 1)], REGISTRY)
    assert "state_dict()" in str(caught.value)


def test_large_tensors_are_received_into_huge_pages() -> None:
    encoded = encode([6, 1, torch.arange(1 << 20)], REGISTRY)
    opened, [place] = open_message(ReceivedFiles(), deque(), memoryview(encoded.head()), encoded.num_payload)
    place[:] = encoded.parts[0].cast("B")
    tensor = opened.read(REGISTRY)[2]
    assert torch.equal(tensor, torch.arange(1 << 20))
    tensor += 1
    is_there, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            is_there = first <= tensor.data_ptr() < last
        elif line.startswith("VmFlags:") and is_there:
            flags = line
    assert "hg" in flags.split()


@given(head=HEADS, num_payload=st.integers(0, 5000))
@settings(max_examples=300)
def test_no_head_crashes_it(head: bytes, num_payload: int) -> None:
    assert memory_taken(head, num_payload) in (None, num_payload)


@pytest.mark.matrix
@given(head=HEADS, num_payload=st.integers(0, 5000))
@settings(max_examples=60_000, derandomize=False, database=None, suppress_health_check=list(HealthCheck))
def test_no_head_crashes_it_in_a_minute(head: bytes, num_payload: int) -> None:
    assert memory_taken(head, num_payload) in (None, num_payload)


def with_table(rows: Any, body: bytes = b"\x92\x06\x01") -> bytes:
    table = msgpack.packb(rows)
    return TABLE_BYTES.pack(len(table)) + table + body


@pytest.mark.parametrize(
    ("head", "num_payload", "problem"),
    [
        (with_table([[0, 0, 2**40]]), 100, "not as long as the tensors"),
        (with_table([[0, 0, -1]]), 0, "row that is not valid"),
        (with_table([[0, 0, 2**63, 2**63]]), 100, "not as long"),
        (with_table([[99, 0, 1]]), 4, "row that is not valid"),
        (with_table([[0, 0, *[1] * 100]]), 4, "row that is not valid"),
        (with_table([[-3, 64], [0, 0, 16]]), 0, "did not arrive"),
        (with_table([]), 0, "table that is not a list"),
        (TABLE_BYTES.pack(0) + b"\x92\x06\x01", 10, "does not announce"),
        (TABLE_BYTES.pack(500) + b"\x90", 0, "ends within its table"),
    ],
)
def test_what_is_announced_is_checked_before_memory_is_taken(head: bytes, num_payload: int, problem: str) -> None:
    with pytest.raises(BadFrame, match=problem):
        open_message(ReceivedFiles(), deque(), memoryview(head), num_payload)


def test_nesting_and_empty_messages_are_refused() -> None:
    deep = b"\x91" * 5000 + b"\xc0"
    tuples = b"\xc0"
    for _ in range(100):
        tuples = msgpack.packb(msgpack.ExtType(2, b"\x91" + tuples))
    for body in (
        deep,
        b"\x92\x06" + tuples,
        b"",
        b"\xc0",
        b"\x90",
        b"\xc1",
        msgpack.packb([1, msgpack.ExtType(77, b"")]),
    ):
        opened, _ = open_message(ReceivedFiles(), deque(), memoryview(TABLE_BYTES.pack(0) + body), 0)
        with pytest.raises(BadFrame):
            opened.read(REGISTRY)


@pytest.mark.parametrize("kind", ["unsealed", "short", "pipe"])
def test_a_file_that_can_still_change_or_does_not_fit_is_refused(kind: str) -> None:
    head = memoryview(with_table([[-3, 64], [0, 0, 16]]))
    if kind == "pipe":
        file, other = os.pipe()
        os.close(other)
    elif kind == "short":
        file = PayloadFiles().send([memoryview(bytes(60))])
        head = memoryview(with_table([[-3, 2 << 20], [0, 0, 1 << 19]]))
    else:
        file = os.memfd_create("test")
        os.write(file, bytes(64))
    with pytest.raises(BadFrame, match="file"):
        open_message(ReceivedFiles(), deque([file]), head, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
