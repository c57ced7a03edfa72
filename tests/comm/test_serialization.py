"""The codec: every plain value and tensor comes back equal; anything else is refused, on both sides."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.serialization import DTYPES, deserialize, deserialize_tensor, serialize, serialize_tensor
from torsh_distributed.errors import SerializationError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    back = deserialize(serialize(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_tensors_of_every_dtype_and_shape_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numel = math.prod(shape) * dtype.itemsize
    raw = torch.arange(numel, dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    tensor = raw.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)
    data = serialize_tensor(tensor)
    back = deserialize_tensor(data)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    assert data[:4] == b"TSHT"


def test_views_and_gradients_travel_as_their_values() -> None:
    matrix = torch.arange(12.0).view(3, 4).requires_grad_()
    back = deserialize(serialize({"rows": matrix[:, ::2], "t": matrix.t()}))
    assert torch.equal(back["rows"], matrix[:, ::2])
    assert torch.equal(back["t"], matrix.t())
    assert not back["t"].requires_grad


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "value"),
        ({"a": [1, lambda: 0]}, r"value\['a'\]\[1\]"),
        ((1, {2: range(3)}), r"value\[1\]\[2\]"),
        ({torch.float32: 1}, "value key"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(SerializationError, match=f"{path} cannot be sent"):
        serialize(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(SerializationError, match="contains itself"):
        serialize(loop)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_or_give_plain_values(data: bytes) -> None:
    try:
        value = deserialize(data)
    except SerializationError:
        return
    assert type(deserialize(serialize(value))) is type(value)


class Trap:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("the bytes were unpickled",))


@pytest.mark.parametrize("wrap", [lambda at: at, lambda at: [1, [at]], lambda at: {"at": at}, lambda at: {at: 1}])
def test_a_point_in_time_of_messagepack_is_refused(wrap: Callable[[object], object]) -> None:
    data = msgpack.packb(wrap(msgpack.Timestamp(1, 2)))
    with pytest.raises(SerializationError, match="timestamp"):
        deserialize(data)


def test_a_pickle_is_not_opened() -> None:
    with pytest.raises(SerializationError):
        deserialize(pickle.dumps(Trap()))


@given(st.data())
def test_a_cut_or_flipped_tensor_is_refused_or_of_the_same_size(data: st.DataObject) -> None:
    whole = bytearray(serialize_tensor(torch.arange(6, dtype=torch.int16)))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(SerializationError):
        deserialize_tensor(bytes(whole[:cut]))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    try:
        back = deserialize_tensor(bytes(whole))
    except SerializationError:
        return
    assert back.numel() * back.element_size() == 12
