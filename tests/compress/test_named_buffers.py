"""Values kept by name follow their parameter through any layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.compress.named_buffers import FlatEntry, NamedBuffers, split
from torsh_distributed.errors import TensorShapeMismatch

CPU = torch.device("cpu")
NAMES = ["a", "b", "c", "d"]


@given(st.lists(st.permutations(NAMES).flatmap(lambda names: st.integers(1, 4).map(lambda n: names[:n])), max_size=8))
def test_what_is_kept_follows_its_name_through_any_buckets(buckets: list[list[str]]) -> None:
    """Each bucket adds 1 to all it holds: every name counts the buckets it was in."""
    kept = NamedBuffers()
    counts = dict.fromkeys(NAMES, 0)
    for bucket in buckets:
        layout = tuple(FlatEntry(name, NAMES.index(name) + 1) for name in bucket)
        kept.flat(layout, CPU).add_(1)
        for name in bucket:
            counts[name] += 1
    for name, value in kept.state_dict().items():
        assert value.tolist() == [counts[name]] * (NAMES.index(name) + 1)
    assert set(kept) == {name for name, count in counts.items() if count}


def test_a_parameter_of_another_size_is_refused_by_name() -> None:
    kept = NamedBuffers()
    kept.flat((FlatEntry("a", 3),), CPU)
    with pytest.raises(TensorShapeMismatch, match="a has 4 elements, but 3 values are kept for it"):
        kept.flat((FlatEntry("a", 4), FlatEntry("b", 1)), CPU)


def test_dropping_one_leaves_the_others_of_its_bucket() -> None:
    kept = NamedBuffers()
    kept.flat((FlatEntry("a", 2), FlatEntry("b", 2)), CPU).copy_(torch.arange(4.0))
    kept.drop(["a"])
    assert "a" not in kept
    layout = (FlatEntry("b", 2), FlatEntry("a", 2))
    assert [part.tolist() for part in split(kept.flat(layout, CPU), layout)] == [[2.0, 3.0], [0.0, 0.0]]
