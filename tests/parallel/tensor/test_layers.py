"""Split layers against the whole ones: outputs and gradients, at even and odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError, InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelEmbedding,
    RowParallelLinear,
    TensorCut,
)


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def compare(whole: nn.Module, split: nn.Module, inputs: Tensor, cuts: dict[str, TensorCut]) -> None:
    """Same output; same gradient of the input; gradients of parameters are the pieces of the whole ones."""
    results = []
    for module in (whole, split):
        given = inputs.clone().requires_grad_(inputs.is_floating_point())
        out = module(given)
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        results.append((out.detach(), given.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    rank, size = dist.get_rank(), dist.get_world_size()
    wholes = dict(whole.named_parameters())
    for name, param in split.named_parameters():
        expected = wholes[name].grad
        assert expected is not None
        if name in cuts:
            expected = cuts[name].part(expected, rank=rank, size=size)
        torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def twins(build: Callable[[], nn.Module], build_split: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A whole and a split layer drawn alike; on ranks other than 0 the draw differs, and rank 0's must win."""
    torch.manual_seed(3)
    whole = build()
    torch.manual_seed(3 if dist.get_rank() == 0 else 4)
    return whole, build_split()


def check_linears() -> None:
    mesh = tp_mesh()
    inputs = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    whole, column = twins(lambda: nn.Linear(7, 11), lambda: ColumnParallelLinear(7, 11, mesh=mesh))
    compare(whole, column, inputs, {"weight": TensorCut(0), "bias": TensorCut(0)})
    whole, row = twins(lambda: nn.Linear(7, 4, bias=False), lambda: RowParallelLinear(7, 4, bias=False, mesh=mesh))
    compare(whole, row, inputs, {"weight": TensorCut(1)})

    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 7))

    def split_pair() -> nn.Module:
        first = ColumnParallelLinear(7, 10, mesh=mesh, gather_output=False)
        return nn.Sequential(first, nn.GELU(), RowParallelLinear(10, 7, mesh=mesh, input_is_parallel=True))

    compare(
        *twins(pair, split_pair), inputs, {"0.weight": TensorCut(0), "0.bias": TensorCut(0), "2.weight": TensorCut(1)}
    )
    with pytest.raises(TensorShapeMismatch, match="neither whole nor this rank's piece"):
        RowParallelLinear(12, 4, mesh=mesh)(torch.zeros(2, 5))


def check_embeddings() -> None:
    mesh = tp_mesh()
    ids = torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(0))
    for padding in (None, 5):
        whole, split = twins(
            lambda p=padding: nn.Embedding(9, 4, padding_idx=p),
            lambda p=padding: ParallelEmbedding(9, 4, padding_idx=p, mesh=mesh),
        )
        compare(whole, split, ids, {"weight": TensorCut(0)})
    # Three rows over four ranks: the last has none.
    compare(
        *twins(lambda: nn.Embedding(3, 4), lambda: ParallelEmbedding(3, 4, mesh=mesh)),
        ids % 3,
        {"weight": TensorCut(0)},
    )
    with pytest.raises(InvalidArgument, match="max_norm"):
        ParallelEmbedding.from_embedding(nn.Embedding(9, 4, max_norm=1.0), mesh)


class PlainAttention(nn.Module):
    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.head_dim = heads, shared, width // heads
        self.query_key_value = nn.Linear(width, (heads + 2 * shared) * self.head_dim)
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.query_key_value(hidden).split(
                [self.heads * self.head_dim, self.shared * self.head_dim, self.shared * self.head_dim], dim=-1
            )
        )
        key, value = (part.repeat_interleave(self.heads // self.shared, dim=1) for part in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))


def check_attention() -> None:
    mesh, size = tp_mesh(), dist.get_world_size()
    inputs = torch.randn(2, 5, 12 * size, generator=torch.Generator().manual_seed(0))
    for heads, shared in [(2 * size, 2 * size), (2 * size, size)]:
        width, head_dim = 12 * size, 6
        cut = TensorCut(0, (width, shared * head_dim, shared * head_dim))
        whole, split = twins(
            lambda w=width, h=heads, s=shared: PlainAttention(w, h, s),
            lambda w=width, h=heads, s=shared: ParallelAttention(w, h, num_key_value_heads=s, mesh=mesh),
        )
        compare(
            whole,
            split,
            inputs,
            {"query_key_value.weight": cut, "query_key_value.bias": cut, "projection.weight": TensorCut(1)},
        )
    with pytest.raises(ConfigurationError, match=rf"{size + 1} heads, which {size} ranks cannot share evenly"):
        ParallelAttention(4 * (size + 1), size + 1, mesh=mesh)


def check_all() -> None:
    check_linears()
    check_embeddings()
    check_attention()


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "torsh"), (3, "shm"), (4, "gloo")])
def test_split_layers_equal_whole_ones(world: World, num_ranks: int, backend: str) -> None:
    world.run(check_all, num_ranks=num_ranks, backend=backend)


def sums_of_gradients(is_shared: bool) -> tuple[int, float]:
    """How often gradients are summed over the ranks where three layers take one activation, and that sum's norm."""
    mesh = tp_mesh()
    torch.manual_seed(0)
    layers = [ColumnParallelLinear(8, 12, mesh=mesh, gather_output=False) for _ in range(3)]
    points = torch.randn(4, 8, requires_grad=True)
    inputs = [points] * 3 if is_shared else [points.view_as(points) for _ in range(3)]
    total = torch.stack([layer(one).sin().sum() for layer, one in zip(layers, inputs, strict=True)]).sum()
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.CollectiveEvent)
    total.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    end()
    assert points.grad is not None
    return len(seen), float(points.grad.norm())


def test_layers_that_take_the_same_activation_sum_its_gradient_once(world: World) -> None:
    [(once, shared_norm), *_] = world.run(sums_of_gradients, True, backend="shm")
    [(thrice, norm), *_] = world.run(sums_of_gradients, False, backend="shm")
    assert (once, thrice) == (1, 3)
    assert shared_norm == pytest.approx(norm, rel=1e-5)
