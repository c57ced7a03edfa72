"""The largest elements, exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.examples import examples
from torsh_distributed.compress.codecs.sparse.selection import at_least, largest, share_of
from torsh_distributed.compress.messages import indices as indices_module


@pytest.fixture(params=["compiled", "portable"], autouse=True, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds for the compiled kernels, where they were built, and for the operators they stand for."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "portable":
            patch.setattr(indices_module, "compiled_module", lambda: None)
        yield


def reference(x: torch.Tensor, count: int) -> torch.Tensor:
    """A stable sort: of equal magnitudes the first."""
    return x.abs().sort(descending=True, stable=True).indices[:count].sort().values


@examples
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3.0]), max_size=40), st.integers(0, 50))
def test_of_equal_magnitudes_the_first_are_taken(values: list[float], count: int) -> None:
    x = torch.tensor(values)
    assert torch.equal(largest(x, count), reference(x, count))


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    numel = 200_000
    rows = torch.randn(numel // 500, 500)
    return {
        "normal": torch.randn(numel),
        "heavy tails": torch.randn(numel) / torch.rand(numel),
        "mostly zero": torch.randn(numel) * (torch.rand(numel) < 0.002),
        "all zero": torch.zeros(numel),
        "constant": torch.full((numel,), -2.0),
        "one large run": torch.cat([torch.randn(numel - 700), 100 + torch.rand(700)]),
        "one large column": (rows * torch.where(torch.arange(500) == 7, 50.0, 1.0)).flatten(),
        "tiny": torch.randn(numel) * 1e-40,
        "huge": torch.randn(numel).clamp(-3, 3) * 1e38,
    }


@pytest.mark.parametrize("kind", tensors())
def test_a_sample_only_saves_work(kind: str) -> None:
    x = tensors()[kind]
    for count in (1, 20, 2000, 20_000, 60_000, 199_999):
        assert torch.equal(largest(x, count), reference(x, count)), count


@examples
@given(st.floats(0, 4, width=32))
def test_what_reaches_a_magnitude_is_found(threshold: float) -> None:
    x = torch.linspace(-3, 3, 1001)
    assert torch.equal(at_least(x, threshold), (x.abs() >= threshold).nonzero().squeeze(1))


def test_what_reaches_a_magnitude_is_found_across_pieces_of_a_scan() -> None:
    x = torch.zeros(300_000)
    x[[0, 131_071, 131_072, 262_144, 299_999]] = -1.0
    assert at_least(x, 0.5).tolist() == [0, 131_071, 131_072, 262_144, 299_999]


def test_nothing_reaches_what_no_float_can_be() -> None:
    assert at_least(torch.full((3,), torch.finfo(torch.float32).max), 1e39).numel() == 0
    assert at_least(torch.full((3,), torch.finfo(torch.float32).max), torch.finfo(torch.float32).max).numel() == 3


def test_a_share_is_rounded_and_at_least_one_element_of_some() -> None:
    assert [share_of(0.01, count) for count in (0, 1, 10, 149, 151)] == [0, 1, 1, 1, 2]
    assert share_of(1.0, 3) == 3
