"""Frames of the TCP store: what is encoded comes back, what is malformed is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.store.tcp.tcp_protocol import FRAME_HEADER, decode, encode, frame, number
from torsh_distributed.comm.trust.handshake import MAC_BYTES, Signer


@given(fields=st.lists(st.none() | st.binary(max_size=50), max_size=8))
def test_a_frame_holds_its_fields(fields: list[bytes | None]) -> None:
    data = frame(encode(fields))
    (length,) = FRAME_HEADER.unpack_from(data)
    body = data[FRAME_HEADER.size :]
    assert len(body) == length
    assert decode(body) == fields


def test_a_signed_frame_has_its_signature_before_the_body() -> None:
    data = frame(b"body", Signer(b"key"))
    assert data.endswith(b"body")
    Signer(b"key").check(data[FRAME_HEADER.size : FRAME_HEADER.size + MAC_BYTES], b"body")


@given(fields=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=4), data=st.data())
def test_a_frame_cut_short_is_refused_or_ends_between_fields(fields: list[bytes], data: st.DataObject) -> None:
    body = encode(fields)
    cut = body[: data.draw(st.integers(min_value=1, max_value=len(body) - 1))]
    borders = {len(encode(fields[:count])) for count in range(len(fields))}
    if len(cut) in borders:
        assert decode(cut) == fields[: len(decode(cut))]
    else:
        with pytest.raises(ValueError, match="a frame ends within a field"):
            decode(cut)


@pytest.mark.parametrize("value", [0, -7, 0.1, 1e9, 2**63 - 1])
def test_numbers_keep_their_exact_value(value: float) -> None:
    text = number(value)
    assert text is not None
    assert type(value)(text) == value
    assert number(None) is None
