"""Messages: what was sealed opens, what was changed on the way does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.examples import examples
from torsh_distributed.compress.messages.compressed_gradient import HEADER_BYTES, MessageSpec, open_message, seal
from torsh_distributed.errors import CompressionError


def sealed(spec: MessageSpec) -> Tensor:
    message = torch.zeros(spec.message_bytes, dtype=torch.uint8)
    payload = spec.payload_of(message)
    payload.copy_(torch.randint(0, 256, payload.shape, generator=torch.Generator().manual_seed(spec.num_bytes)))
    seal(message, spec)
    return message


@given(st.integers(0, 100))
@examples
def test_what_was_sealed_opens(num_bytes: int) -> None:
    spec = MessageSpec(123, 45, num_bytes)
    message = sealed(spec)
    assert torch.equal(open_message(message, spec), message[HEADER_BYTES : HEADER_BYTES + num_bytes])
    assert message.numel() % 16 == 0
    assert HEADER_BYTES <= 32


@given(st.integers(0, 70), st.data())
@examples
def test_any_flipped_bit_is_noticed(num_bytes: int, data: st.DataObject) -> None:
    spec = MessageSpec(123, 45, num_bytes)
    message = sealed(spec)
    place = data.draw(st.integers(0, HEADER_BYTES + num_bytes - 1))
    message[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CompressionError):
        open_message(message, spec)


def test_bytes_that_changed_places_are_noticed() -> None:
    spec = MessageSpec(123, 45, 64)
    message = sealed(spec)
    message[HEADER_BYTES : HEADER_BYTES + 8] = message[HEADER_BYTES : HEADER_BYTES + 8].roll(4)
    with pytest.raises(CompressionError, match="checksum differs"):
        open_message(message, spec)


@pytest.mark.parametrize("other", [MessageSpec(124, 45, 64), MessageSpec(123, 46, 64), MessageSpec(123, 45, 63)])
def test_a_message_of_another_codec_or_size_is_refused(other: MessageSpec) -> None:
    with pytest.raises(CompressionError, match="of another codec or size"):
        open_message(sealed(MessageSpec(123, 45, 64)), other)


def test_arbitrary_bytes_are_refused() -> None:
    with pytest.raises(CompressionError, match="not a compressed gradient"):
        open_message(torch.full((96,), 7, dtype=torch.uint8), MessageSpec(123, 45, 64))
