"""The noise: the documented hash, uniform, independent of neighbours and of how the work is cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.kernels.noise import noise, uniform

CPU = torch.device("cpu")


def by_the_book(key: int, index: int) -> int:
    bits = (index * 0x9E3779B9 + key) % 2**32
    bits = (bits ^ bits >> 16) * 0x21F0AAAD % 2**32
    bits = (bits ^ bits >> 15) * 0x735A2D97 % 2**32
    return bits ^ bits >> 15


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_it_is_the_documented_hash(key: int, start: int) -> None:
    found = noise(key, start, 3, CPU).tolist()
    assert [value % 2**32 for value in found] == [by_the_book(key, start + index) for index in range(3)]


def test_a_part_draws_what_the_whole_draws() -> None:
    assert torch.equal(noise(7, 1000, 50, CPU), noise(7, 0, 1050, CPU)[1000:])


def test_it_is_uniform_and_keys_and_neighbours_are_independent() -> None:
    num_elements = 1 << 18
    tolerance = 5 / num_elements**0.5  # five standard deviations of a correlation, more than those of a mean
    drawn = [uniform(Key(step=3, rank=rank).own, 0, num_elements, CPU) for rank in range(2)]
    for values in drawn:
        assert abs(float(values.mean()) - 0.5) < tolerance
        assert abs(float(values.var()) - 1 / 12) < tolerance
        assert 0 <= float(values.min()) < float(values.max()) < 1
    pairs = torch.stack([drawn[0][:-1], drawn[1][:-1], drawn[0][1:]])
    assert float((torch.corrcoef(pairs) - torch.eye(3)).abs().max()) < tolerance
