"""Every collective, on every dtype and shape, against a reference computed locally from what all ranks held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from tests.comm.backends.ranks import (
    ALL_DTYPES,
    CORES,
    SLOT_BYTES,
    all_gather_single,
    assert_same,
    data,
    fold_reference,
    on_shm,
    ops_for,
    reduce_scatter_single,
)

SMALL: tuple[tuple[int, ...], ...] = ((0,), (), (3, 5), (1000,))
# Around the edge of a slot in 4-byte elements, and several slots.
LARGE = ((SLOT_BYTES // 4,), (SLOT_BYTES // 4 + 1,), (7 * SLOT_BYTES // 8 + 3,))
WORLDS = (1, 2, 3, 4)


def shapes_for(dtype: torch.dtype, op: object = dist.ReduceOp.SUM) -> tuple[tuple[int, ...], ...]:
    """All shapes where sizes matter, few where only the arithmetic does: the suite is to be quick."""
    if op != dist.ReduceOp.SUM:
        return ((1000,),)
    return (*SMALL, *LARGE) if dtype in (torch.float32, torch.bfloat16) else SMALL


def everyone(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [data(shape, dtype, rank, seed) for rank in range(dist.get_world_size())]


def reduce_everything() -> int:
    rank, size, cases = dist.get_rank(), dist.get_world_size(), 0
    for dtype in ALL_DTYPES:
        for op in ops_for(dtype):
            for shape in shapes_for(dtype, op):
                inputs = everyone(shape, dtype)
                expected = fold_reference(inputs, op)
                what = f"{dtype} {op} {shape}"

                tensor = inputs[rank].clone()
                dist.all_reduce(tensor, op)
                assert_same(tensor, expected, f"all_reduce {what}")

                root = cases % size
                tensor = inputs[rank].clone()
                dist.reduce(tensor, root, op)
                assert_same(tensor, expected if rank == root else inputs[rank], f"reduce {what}")

                parts = [everyone(shape, dtype, seed) for seed in range(size)]  # parts[r][s]: for rank r, from rank s
                output = torch.empty_like(inputs[rank])
                dist.reduce_scatter(output, [part[rank] for part in parts], op)
                assert_same(output, fold_reference(parts[rank], op), f"reduce_scatter {what}")

                if shape:
                    source = torch.cat([part[rank] for part in parts])
                    output = torch.empty_like(inputs[rank])
                    reduce_scatter_single(output, source, op)
                    assert_same(output, fold_reference(parts[rank], op), f"reduce_scatter_single {what}")
                cases += 1
    return cases


def copy_everything() -> int:
    rank, size, cases = dist.get_rank(), dist.get_world_size(), 0
    for dtype in (*ALL_DTYPES, torch.float8_e4m3fn):
        for shape in shapes_for(dtype):
            inputs = [tensor.to(dtype) for tensor in everyone(shape, torch.float32 if dtype.itemsize == 1 else dtype)]
            what, root = f"{dtype} {shape}", cases % size

            tensor = inputs[rank].clone()
            dist.broadcast(tensor, root)
            assert torch.equal(_bits(tensor), _bits(inputs[root])), f"broadcast {what}"

            outputs = [torch.zeros_like(inputs[rank]) for _ in range(size)]
            dist.all_gather(outputs, inputs[rank])
            assert all(map(torch.equal, map(_bits, outputs), map(_bits, inputs))), f"all_gather {what}"

            outputs = [torch.zeros_like(inputs[rank]) for _ in range(size)]
            dist.gather(inputs[rank], outputs if rank == root else None, dst=root)
            if rank == root:
                assert all(map(torch.equal, map(_bits, outputs), map(_bits, inputs))), f"gather {what}"

            output = torch.zeros_like(inputs[rank])
            dist.scatter(output, inputs if rank == root else None, src=root)
            assert torch.equal(_bits(output), _bits(inputs[rank])), f"scatter {what}"

            if shape:
                single = torch.zeros(shape[0] * size, *shape[1:], dtype=torch.float32).to(dtype)
                all_gather_single(single, inputs[rank])
                assert torch.equal(_bits(single), torch.cat([_bits(tensor) for tensor in inputs])), what

            outputs = [torch.zeros_like(inputs[rank]) for _ in range(size)]
            # What rank s sends to rank r is its tensor turned by r, so that every pair differs.
            dist.all_to_all(outputs, [_turned(inputs[rank], target) for target in range(size)])
            expected = [_turned(inputs[source], rank) for source in range(size)]
            assert all(map(torch.equal, map(_bits, outputs), map(_bits, expected))), f"all_to_all {what}"
            cases += 1
    return cases


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _turned(tensor: Tensor, by: int) -> Tensor:
    flat = tensor.flatten()
    cut = by % max(flat.numel(), 1)
    return torch.cat([_bits(flat[cut:]), _bits(flat[:cut])]).view(tensor.dtype).view(tensor.shape)


def unequal_sizes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Rank s sends (s + 1) * (r + 1) - 1 rows of two to rank r: none for the first pair, more than a slot for the last.
    scale = 5000

    def rows(source: int, target: int) -> int:
        return ((source + 1) * (target + 1) - 1) * scale

    source = torch.cat([torch.full((rows(rank, to), 2), 10.0 * rank + to) for to in range(size)])
    output = torch.empty(sum(rows(one, rank) for one in range(size)), 2)
    dist.all_to_all_single(
        output,
        source,
        output_split_sizes=[rows(one, rank) for one in range(size)],
        input_split_sizes=[rows(rank, to) for to in range(size)],
    )
    expected = torch.cat([torch.full((rows(one, rank), 2), 10.0 * one + rank) for one in range(size)])
    torch.testing.assert_close(output, expected, rtol=0, atol=0)

    outputs = [torch.empty(one * 40_000) for one in range(size)]
    dist.all_gather(outputs, torch.full((rank * 40_000,), float(rank)))
    assert [part.sum().item() for part in outputs] == [float(one * one * 40_000) for one in range(size)]


def odd_layouts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(60.0).reshape(6, 10) + rank
    total = size * torch.arange(60.0).reshape(6, 10) + sum(range(size))

    tensor = whole.clone().t()
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, total.t(), rtol=0, atol=0)

    columns = whole.clone()
    dist.all_reduce(columns[:, ::3])
    torch.testing.assert_close(columns[:, ::3], total[:, ::3], rtol=0, atol=0)
    torch.testing.assert_close(columns[:, 1::3], whole[:, 1::3], rtol=0, atol=0)

    image = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    dist.broadcast(image, size - 1)
    assert image.unique().tolist() == [float(size - 1)]

    outputs = [torch.empty(10, 6).t() for _ in range(size)]
    dist.all_gather(outputs, whole.t().contiguous().t())
    torch.testing.assert_close(outputs[rank], whole, rtol=0, atol=0)

    output = torch.empty(10, 2 * size).t()
    all_gather_single(output, whole[:2])
    torch.testing.assert_close(output[2 * rank : 2 * rank + 2], whole[:2], rtol=0, atol=0)

    parameter = torch.nn.Parameter(torch.ones(4) * rank)
    dist.all_reduce(parameter)
    assert parameter.tolist() == [float(sum(range(size)))] * 4
    with torch.inference_mode():
        frozen = torch.full((4, 4), float(rank)).t()
    dist.all_reduce(frozen[:, ::2])
    assert frozen[:, ::2].unique().tolist() == [float(sum(range(size)))]


def scaled_sums() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    half = dist._make_nccl_premul_sum(0.5)
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor, half)
    assert tensor.unique().tolist() == [0.5 * sum(range(size))]

    source = torch.full((4 * size,), float(rank + 1))
    output = torch.empty(4)
    reduce_scatter_single(output, source, half)
    assert output.tolist() == [0.5 * sum(range(1, size + 1))] * 4
    assert source.unique().tolist() == [float(rank + 1)], "the input of a reduce_scatter is not changed"


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((length,), float(rank)) for length in (1, 0, 1000, 70_000)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(tensor.eq(sum(range(size))).all() for tensor in tensors)

    outputs = [torch.empty(length * size) for length in (2, 5)]
    with dist.distributed_c10d._coalescing_manager():
        for output, length in zip(outputs, (2, 5), strict=True):
            all_gather_single(output, torch.full((length,), float(rank)))
    assert outputs[1].tolist() == [float(one) for one in range(size) for _ in range(5)]

    with dist.distributed_c10d._coalescing_manager():
        for output, length in zip(outputs, (2, 5), strict=True):
            reduce_scatter_single(output[:length], torch.full((length * size,), float(rank)))
    assert outputs[0][:2].tolist() == [float(sum(range(size)))] * 2


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": one, "text": "x" * one} for one in range(size)]
    box = [rank, "from", rank] if rank == 0 else [None, None, None]
    dist.broadcast_object_list(box, src=0)
    assert box == [0, "from", 0]


SHORT_OF_PORTABLE = pytest.mark.parametrize(
    ("num_ranks", "core"),
    [
        # The cores differ in how a rank computes, not in how many of them meet.
        pytest.param(num_ranks, core, marks=pytest.mark.matrix if core == "portable" and num_ranks != 3 else ())
        for num_ranks in WORLDS
        for core in CORES
    ],
)


@SHORT_OF_PORTABLE
def test_reductions_match_the_reference(world: World, tmp_path: Path, core: str, num_ranks: int) -> None:
    counts = world.run(on_shm, tmp_path, core, reduce_everything, num_ranks=num_ranks, backend=None, timeout_s=100)
    assert min(counts) > 100


@SHORT_OF_PORTABLE
def test_copies_arrive_bit_for_bit(world: World, tmp_path: Path, core: str, num_ranks: int) -> None:
    counts = world.run(on_shm, tmp_path, core, copy_everything, num_ranks=num_ranks, backend=None, timeout_s=60)
    assert min(counts) > 60


def odd_cases() -> None:
    for case in (unequal_sizes, odd_layouts, scaled_sums, coalesced, objects):
        case()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_odd_cases(world: World, tmp_path: Path, core: str, num_ranks: int) -> None:
    world.run(on_shm, tmp_path, core, odd_cases, num_ranks=num_ranks, backend=None)
