"""PowerSGD."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.compress.codecs.checks import assert_ranks_agree, average_all, gradient, through
from tests.compress.examples import examples
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Averaged, Key
from torsh_distributed.compress.codecs.linear.powersgd import FactorLayout, PowerSgdCodec
from torsh_distributed.errors import CompressionError, InvalidArgument, TensorShapeMismatch

SHAPES = [(30, 40), (7,), (12, 5, 8), (3, 3), (), (1, 50)]
NUMEL = 30 * 40 + 7 + 12 * 40 + 9 + 1 + 50


def made(rank: int, shapes: list[tuple[int, ...]] = SHAPES) -> PowerSgdCodec:
    codec = PowerSgdCodec(rank)
    codec.set_shapes(0, shapes)
    return codec


def low_rank(rows: int, columns: int, rank: int, seed: int, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator)
    return (left @ torch.randn(rank, columns, generator=generator) * size).flatten()


def test_matrices_worth_it_are_factored_and_the_rest_travels_whole() -> None:
    layout = FactorLayout.of(SHAPES, rank=4)
    assert [(matrix.rows, matrix.columns) for matrix in layout.matrices] == [(30, 40), (12, 40)]
    assert layout.num_whole == 7 + 9 + 1 + 50
    assert layout.num_elements == NUMEL
    at_the_limit = FactorLayout.of([(16, 16), (17, 17)], rank=4)
    assert [matrix.rows for matrix in at_the_limit.matrices] == [17]


@examples
@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=4), st.integers(0, 9))
def test_the_payload_has_the_bytes_that_payload_bytes_says(rank: int, shapes: list[list[int]], seed: int) -> None:
    codec = made(rank, [tuple(shape) for shape in shapes])
    numel = sum(int(torch.Size(shape).numel()) for shape in shapes)
    expected = 0
    for shape in shapes:
        size = int(torch.Size(shape).numel())
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        factors = (rows + columns) * rank
        expected += 4 * (factors if 2 * factors < rows * columns else size)
    payload = codec.encode(gradient(numel, seed), Key())
    assert payload.numel() == codec.payload_bytes(numel) == expected
    assert codec.decode(payload, numel, Key()).shape == (numel,)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e15])
@pytest.mark.parametrize("true_rank", [0, 1, 3, 4])
def test_a_matrix_of_at_most_its_rank_is_exact(true_rank: int, size: float) -> None:
    codec = made(4, [(30, 40), (5,)])
    x = torch.cat([low_rank(30, 40, true_rank, seed=1, size=size), gradient(5, 2)])
    for step in range(3):  # from the second step on it starts from what it found
        error = (through(codec, x, Key(step=step)) - x)[:1200] / size
        assert error.norm() <= 1e-4 * (x[:1200] / size).norm()


@examples
@given(st.integers(0, 100), st.integers(1, 5))
def test_it_never_says_more_than_there_is(seed: int, rank: int) -> None:
    x = gradient(NUMEL, seed)
    codec = made(rank)
    for step in range(2):
        left_out = (x - through(codec, x, Key(step=step))).square().sum()
        assert left_out <= x.square().sum() * (1 + 1e-5)


def test_one_step_is_that_of_the_paper() -> None:
    """P = orthonormal(M Q), Q' = MᵀP, M' = P Q'ᵀ, started from the Q of the step before."""
    codec = made(2, [(30, 40)])
    first, second = gradient(1200, 1), gradient(1200, 2)
    codec.encode(first, Key(step=0))
    before = codec.state_dict()["rights"]["0"].view(2, 40).t()
    matrix = second.view(30, 40)
    basis = torch.linalg.qr((matrix @ before).double()).Q
    expected = basis @ (basis.t() @ matrix.double())
    got = through(codec, second, Key(step=1)).view(30, 40)
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4)


def test_repeated_steps_come_close_to_the_best_of_that_rank() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(40, 60) + 5 * low_rank(40, 60, 3, seed=0).view(40, 60)
    codec = made(3, [(40, 60)])
    for step in range(6):
        got = through(codec, matrix.flatten(), Key(step=step)).view(40, 60)
    u, s, v = torch.linalg.svd(matrix)
    best = (matrix - u[:, :3] @ torch.diag(s[:3]) @ v[:3]).norm()
    assert (matrix - got).norm() < 1.01 * best


@pytest.mark.parametrize("x", [torch.zeros(1200), torch.full((1200,), 2.0)])
def test_zero_and_constant_gradients_are_exact_and_leave_no_trace(x: torch.Tensor) -> None:
    codec = made(3, [(30, 40)])
    for step in range(2):
        torch.testing.assert_close(through(codec, x, Key(step=step)), x, rtol=1e-4, atol=1e-6)
    other = torch.zeros(30, 40)
    other[20:, 30:] = 1.0  # nothing in the first rows and columns
    torch.testing.assert_close(through(codec, other.flatten(), Key(step=3)), other.flatten(), rtol=1e-4, atol=1e-4)


def test_without_shapes_everything_travels_whole() -> None:
    x = gradient(500, 0)
    codec = PowerSgdCodec(1)
    assert torch.equal(through(codec, x, Key()), x)
    assert codec.payload_bytes(500) == 2000


def test_state_goes_on_where_it_was() -> None:
    codec, resumed = made(2), made(2)
    codec.encode(gradient(NUMEL, 1), Key(step=0))
    resumed.load_state_dict(codec.state_dict())
    x = gradient(NUMEL, 2)
    assert torch.equal(codec.encode(x, Key(step=1)), resumed.encode(x, Key(step=1)))
    fresh = made(2)
    resumed.reset()
    assert torch.equal(fresh.encode(x, Key(step=2)), resumed.encode(x, Key(step=2)))


SHAPES_BY_STREAM = {1: [(1,)], 2: [(30, 40), (7,), (12, 5, 8)]}
SIZES = [0, 1, 30 * 40 + 7 + 12 * 40]


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (3, "shm"), (4, "gloo")])
def test_ranks_get_the_projection_of_the_mean(world: World, num_ranks: int, backend: str) -> None:
    by_rank = world.run(
        average_all, partial(PowerSgdCodec, 2), SIZES, SHAPES_BY_STREAM, num_ranks=num_ranks, backend=backend
    )
    assert_ranks_agree(by_rank)
    own = [gradient(SIZES[2], seed=200 + rank) for rank in range(num_ranks)]
    mean = torch.stack(own).mean(dim=0)
    outcome = by_rank[0][2]
    torch.testing.assert_close(outcome.mean[1200:1207], mean[1200:1207])
    for start, rows, columns in ((0, 30, 40), (1207, 12, 40)):
        part = slice(start, start + rows * columns)
        found = outcome.mean[part].view(rows, columns)
        assert int(torch.linalg.matrix_rank(found, rtol=1e-4)) == 2
        basis = torch.linalg.svd(found, full_matrices=False).U[:, :2]
        wanted = mean[part].view(rows, columns)
        torch.testing.assert_close(found, basis @ basis.t() @ wanted, rtol=1e-3, atol=1e-4)
        for outcomes, x in zip(by_rank, own, strict=True):
            sent = basis @ basis.t() @ x[part].view(rows, columns)
            torch.testing.assert_close(outcomes[2].sent[part].view(rows, columns), sent, rtol=1e-3, atol=1e-4)
    first, second = 4 * (2 * 42 + 7), 4 * 2 * 80
    ring = 2 * (num_ranks - 1)
    assert outcome.num_bytes == ring * first // num_ranks + ring * second // num_ranks


def test_ranks_that_begin_differently_agree_all_the_same(world: World) -> None:
    for outcomes in zip(*world.run(average_from_different_states, num_ranks=2), strict=True):
        torch.testing.assert_close(outcomes[0].mean, outcomes[1].mean, rtol=0, atol=0)
        torch.testing.assert_close(outcomes[0].mean, (outcomes[0].sent + outcomes[1].sent) / 2, rtol=1e-4, atol=1e-5)


def average_from_different_states() -> list[Averaged]:
    """Rank 1 resumes from its own state, rank 0 starts from scratch."""
    rank = dist.get_rank()
    codec = made(2)
    if rank == 1:
        codec.encode(gradient(NUMEL, 9), Key())
    assert dist.group.WORLD is not None
    return [
        codec.average(gradient(NUMEL, seed=10 * step + rank), dist.group.WORLD, Key(step=step, rank=rank))
        for step in range(2)
    ]


def test_bad_input_is_refused_and_a_plan_finds_it() -> None:
    with pytest.raises(InvalidArgument, match="rank"):
        PowerSgdCodec(0)
    codec = make_codec("powersgd:2")
    assert isinstance(codec, PowerSgdCodec)
    codec.set_shapes(0, [(30, 40)])
    with pytest.raises(TensorShapeMismatch, match="1200 elements, the gradient 1000"):
        codec.encode(torch.zeros(1000), Key())
    with pytest.raises(CompressionError, match="560 bytes"):
        codec.decode(torch.zeros(559, dtype=torch.uint8), 1200, Key())
