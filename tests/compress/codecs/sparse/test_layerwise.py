"""Layer-wise top-k."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.compress.codecs.checks import (
    assert_contracts,
    assert_mean_of_messages,
    assert_ranks_agree,
    average_all,
    gradient,
    through,
)
from tests.compress.examples import examples
from torsh_distributed import events
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.layerwise import LayerwiseCodec, divide_budget, measure_curve
from torsh_distributed.compress.codecs.sparse.magnitude import TopKCodec
from torsh_distributed.compress.codecs.sparse.selection import share_of
from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch


def two_layers() -> torch.Tensor:
    """A layer whose energy is in a few elements, and a flat one with gradients a hundred times smaller."""
    torch.manual_seed(0)
    steep = torch.randn(4000) ** 5
    flat = 0.01 * (1 + 0.1 * torch.rand(4000))
    return torch.cat([steep, flat])


def made(share: float, **options: float) -> LayerwiseCodec:
    codec = LayerwiseCodec(share, **options)  # type: ignore[arg-type]
    codec.set_shapes(0, [(40, 100), (4000,)])
    return codec


@examples
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
    st.sampled_from([0.02, 0.1, 0.5, 1.0]),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_the_budget_is_met_exactly_and_no_layer_is_silent(
    sizes: list[int], share: float, sensitivity: float, seed: int
) -> None:
    numel = sum(sizes)
    codec = LayerwiseCodec(share, sensitivity=sensitivity)
    codec.set_shapes(0, [(size,) for size in sizes])
    x = gradient(numel, seed)
    payload = codec.encode(x, Key())
    assert payload.numel() == codec.payload_bytes(numel) == TopKCodec(share).payload_bytes(numel)
    indices = codec.select(x, Key())
    assert indices.numel() == share_of(share, numel)
    assert (indices[1:] > indices[:-1]).all()
    counts = codec.counts(0)
    if counts is not None:
        assert sum(counts) == share_of(share, numel)
        assert all(min(size, 1) <= count <= size for count, size in zip(counts, sizes, strict=True))


def test_each_layer_sends_its_largest() -> None:
    codec = made(0.05)
    x = two_layers()
    got = through(codec, x, Key())
    counts = codec.counts(0)
    assert counts is not None
    for start, count in zip((0, 4000), counts, strict=True):
        layer = x[start : start + 4000]
        expected = torch.zeros(4000)
        kept = layer.abs().topk(count).indices
        expected[kept] = layer[kept]
        torch.testing.assert_close(got[start : start + 4000], expected, rtol=2**-10, atol=1e-7)


def test_one_more_element_gains_the_same_everywhere() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4000), 50 * torch.randn(2000) ** 3])
    codec = LayerwiseCodec(0.1)
    codec.set_shapes(0, [(4000,), (2000,)])
    codec.encode(x, Key())
    counts = codec.counts(0)
    assert counts is not None
    marginal = []
    for layer, count in zip((x[:4000], x[4000:]), counts, strict=True):
        energies = layer.square().sort(descending=True).values
        marginal.append(float(energies[count] / energies.sum()))
    assert marginal[0] == pytest.approx(marginal[1], rel=0.1)


def test_layers_leave_out_less_of_their_energy_than_with_equal_shares() -> None:
    x = two_layers()
    layers = x.split(4000)
    curves = [measure_curve(layer) for layer in layers]
    counts = divide_budget(curves, [4000, 4000], 800, sensitivity=1.0)
    assert sum(curve.error(count) for curve, count in zip(curves, counts, strict=True)) < sum(
        curve.error(400) for curve in curves
    )
    exact = layers[0].square().sort(descending=True).values
    assert curves[0].error(400) == pytest.approx(float(exact[400:].sum() / exact.sum()), rel=1e-3)


def test_without_sensitivity_it_is_top_k_over_everything() -> None:
    torch.manual_seed(0)
    layer = torch.randn(4000)
    x = torch.cat([layer, 0.5 * layer])
    codec = made(0.1, sensitivity=0.0)
    assert torch.equal(codec.select(x, Key()), TopKCodec(0.1).select(x, Key()))
    relative = made(0.1)
    relative.encode(x, Key())
    assert relative.counts(0) == (400, 400)  # the layers are alike but for their size


def test_shares_are_measured_again_every_few_steps_and_reported() -> None:
    codec = made(0.1, every=10)
    x, turned = two_layers(), two_layers().flip(0)
    heard: list[events.Event] = []
    unsubscribe = events.subscribe(heard.append, events.DecisionEvent)
    try:
        codec.encode(x, Key(step=0))
        first = codec.counts(0)
        codec.encode(turned, Key(step=9))
        assert codec.counts(0) == first
        codec.encode(turned, Key(step=10))
    finally:
        unsubscribe()
    assert first is not None
    assert codec.counts(0) == first[::-1]
    decisions = [event for event in heard if isinstance(event, events.DecisionEvent)]
    assert [event.subject for event in decisions] == ["compress.layerwise"] * 2
    assert "800 of 8000 elements" in decisions[0].choice
    assert "leave out" in decisions[0].reason


def test_state_goes_on_where_it_was() -> None:
    codec, resumed = made(0.1), made(0.1)
    codec.encode(two_layers(), Key(step=3))
    resumed.load_state_dict(codec.state_dict())
    x = two_layers().flip(0)
    assert torch.equal(codec.encode(x, Key(step=4)), resumed.encode(x, Key(step=4)))
    resumed.reset()
    assert resumed.counts(0) is None
    other = LayerwiseCodec(0.1)
    other.set_shapes(0, [(10,), (10,)])
    other.load_state_dict(codec.state_dict())
    assert other.counts(0) is None


@pytest.mark.parametrize("x", [torch.zeros(8000), torch.full((8000,), -2.0)])
def test_zero_and_constant_gradients_are_no_special_case(x: torch.Tensor) -> None:
    assert int((through(made(0.1), x, Key()) != 0).sum()) in (0, 800)


@examples
@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=4, max_size=40), st.sampled_from([0.05, 0.3]))
def test_it_contracts_as_stated(values: list[float], share: float) -> None:
    codec = LayerwiseCodec(share)
    codec.set_shapes(0, [(2,), (len(values) - 2,)])
    assert_contracts(codec, torch.tensor(values), Key())


SHAPES = {2: [(50, 40), (3001,)]}
SIZES = [0, 1, 5001]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_divide_differently_agree(world: World, num_ranks: int) -> None:
    by_rank = world.run(average_all, partial(LayerwiseCodec, 0.05), SIZES, SHAPES, num_ranks=num_ranks, backend="shm")
    assert_ranks_agree(by_rank)
    if num_ranks == 2:
        assert_mean_of_messages(by_rank)


def test_bad_input_is_refused_and_a_plan_finds_it() -> None:
    with pytest.raises(InvalidArgument, match="sensitivity"):
        LayerwiseCodec(0.1, sensitivity=2.0)
    with pytest.raises(InvalidArgument, match="share"):
        LayerwiseCodec(0.0)
    codec = make_codec("layerwise:0.02")
    assert isinstance(codec, LayerwiseCodec)
    codec.set_shapes(0, [(10,), (10,)])
    with pytest.raises(TensorShapeMismatch, match="20 elements, the gradient 30"):
        codec.encode(torch.zeros(30), Key())
