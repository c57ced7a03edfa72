"""What is asked of every codec that sends something for each element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compress.codecs.checks import through
from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.errors import CompressionError

NUM_DRAWS = 2000
NUM_KEYS = 400


def assert_exact_size(codec: Codec, x: Tensor) -> None:
    """The payload is a plain uint8 vector of the size that was promised, and what it says has the length of `x`."""
    payload = codec.encode(x, Key(seed=1))
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.payload_bytes(x.numel()),)
    assert codec.decode(payload, x.numel(), Key()).shape == x.shape


def assert_refuses_damage(codec: Codec) -> None:
    """Payloads of another length, and from gradients that are not finite, are no messages."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(x, Key())
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:0]):
        with pytest.raises(CompressionError, match="message of 3000 elements has"):
            codec.decode(wrong, 3000, Key())
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[1500] = bad
        with pytest.raises(CompressionError, match="cannot have been written"):
            through(codec, x, Key())


def draws(codec: Codec, pattern: Tensor, *, by_key: bool) -> Tensor:
    """Many messages of one pattern, decoded: (draws, elements). Either by as many keys, or as blocks of one message."""
    if by_key:
        return torch.stack([through(codec, pattern, Key(step=step)) for step in range(NUM_KEYS)])
    return through(codec, pattern.repeat(NUM_DRAWS), Key(seed=5)).view(NUM_DRAWS, -1)


def assert_unbiased(codec: Codec, pattern: Tensor, *, by_key: bool, jump: Tensor) -> None:
    """The mean of many messages is the gradient, within six standard errors; and they are not all the same.

    `jump` is how far apart the two values are that an element may become. Where one of them is so rare that no draw
    need have shown it, the standard error is not seen either: twenty expected sightings are certain to show.
    """
    found = draws(codec, pattern, by_key=by_key).double()
    tolerance = 6 * found.std(0) / len(found) ** 0.5 + 20 * jump / len(found)
    assert bool(((found.mean(0) - pattern).abs() <= tolerance).all())
    assert bool((found.std(0) > 0).any())


def assert_keys_decide(codec: Codec, x: Tensor) -> None:
    """The same key gives the same bytes; another step, stream, seed or rank gives others."""
    payload = codec.encode(x, Key(seed=1, step=2, stream=3, rank=4))
    assert torch.equal(payload, codec.encode(x, Key(seed=1, step=2, stream=3, rank=4)))
    for other in (Key(9, 2, 3, 4), Key(1, 9, 3, 4), Key(1, 2, 9, 4), Key(1, 2, 3, 9)):
        assert not torch.equal(payload, codec.encode(x, other))


def assert_key_is_ignored(codec: Codec, x: Tensor) -> None:
    """A codec that rounds in one way says so."""
    assert codec.is_deterministic
    assert torch.equal(codec.encode(x, Key()), codec.encode(x, Key(1, 2, 3, 4)))
