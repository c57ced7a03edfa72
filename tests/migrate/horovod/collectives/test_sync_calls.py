"""Every operation against the same arithmetic on all ranks' tensors, with gradients, dtypes and scaling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torsh_distributed.migrate.horovod as hvd
from tests.bed.world import World
from torsh_distributed.errors import SerializationError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCED = (*FLOATS, torch.int32, torch.int64)
MOVED = (*REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool)


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(17 + rank)
    return torch.randint(-6 if dtype.is_signed else 0, 7, shape, generator=generator).to(dtype)


def reductions() -> None:
    """allreduce in all its forms, over dtypes, dims and reductions."""
    me, size = hvd.rank(), hvd.size()
    for dtype in REDUCED:
        for dims in range(4):
            shape = (3, 2, 4)[:dims]
            everyone = [tensor_of(rank, shape, dtype) for rank in range(size)]
            mine = everyone[me]
            stacked = torch.stack(everyone)
            total = sum(everyone[1:], everyone[0])
            expected = {
                hvd.Sum: total,
                hvd.Min: stacked.amin(0),
                hvd.Max: stacked.amax(0),
                hvd.Product: stacked.prod(0).to(dtype),
                hvd.Average: scaled(total, 1 / size),
            }
            for op, result in expected.items():
                torch.testing.assert_close(hvd.allreduce(mine, op=op), result, rtol=0, atol=0)
            kept = mine.clone()
            torch.testing.assert_close(hvd.allreduce_(kept, op=hvd.Sum), total, rtol=0, atol=0)
            torch.testing.assert_close(kept, total, rtol=0, atol=0)
            got = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
            halves = [scaled(one, 0.5) for one in everyone]
            torch.testing.assert_close(got, scaled(sum(halves[1:], halves[0]), 3.0), rtol=0, atol=0)
            pair = hvd.grouped_allreduce([mine, mine.reshape(-1)], op=hvd.Sum)
            torch.testing.assert_close(pair, [total, total.reshape(-1)], rtol=0, atol=0)
            kept = [mine.clone(), mine.clone()]
            assert hvd.grouped_allreduce_(kept, op=hvd.Max)[1] is kept[1]
            torch.testing.assert_close(kept[0], stacked.amax(0), rtol=0, atol=0)
    mixed = hvd.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.int64)], op=hvd.Sum)
    assert [one.dtype for one in mixed] == [torch.float32, torch.int64]
    flag = torch.tensor([me == 0, False, True])
    assert hvd.allreduce(flag, op=hvd.Max).tolist() == [True, False, True]
    assert hvd.allreduce(flag, op=hvd.Min).tolist() == [False, False, True]


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Horovod's rule: floats in their own precision, integers in float64 and cut."""
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def moves() -> None:
    """allgather, broadcast, alltoall, reducescatter, over every dtype."""
    me, size = hvd.rank(), hvd.size()
    for dtype in MOVED:
        rows = [tensor_of(rank, (rank + 1, 3), dtype) for rank in range(size)]
        torch.testing.assert_close(hvd.allgather(rows[me]), torch.cat(rows), rtol=0, atol=0)
        both = hvd.grouped_allgather([rows[me], rows[me][:, 0].contiguous()])
        torch.testing.assert_close(both[1], torch.cat(rows)[:, 0], rtol=0, atol=0)
        mine = tensor_of(me, (4, 2), dtype)
        for root in range(size):
            kept = mine.clone()
            torch.testing.assert_close(hvd.broadcast(mine, root), tensor_of(root, (4, 2), dtype), rtol=0, atol=0)
            hvd.broadcast_(kept, root)
            torch.testing.assert_close(kept, tensor_of(root, (4, 2), dtype), rtol=0, atol=0)
        splits = torch.tensor([(me + other) % 3 for other in range(size)], dtype=torch.int32)
        sent = tensor_of(me, (int(splits.sum()), 2), dtype)
        got, counts = hvd.alltoall(sent, splits)
        parts = []
        for other in range(size):
            theirs = [(other + third) % 3 for third in range(size)]
            start = sum(theirs[:me])
            parts.append(tensor_of(other, (sum(theirs), 2), dtype)[start : start + theirs[me]])
        torch.testing.assert_close(got, torch.cat(parts), rtol=0, atol=0)
        assert counts.dtype == torch.int32
        assert counts.tolist() == [len(part) for part in parts]
    for dtype in REDUCED:
        for num_rows in (size, 2 * size + 1, 1):
            everyone = [tensor_of(rank, (num_rows, 2), dtype) for rank in range(size)]
            total = sum(everyone[1:], everyone[0])
            share = [num_rows // size + (rank < num_rows % size) for rank in range(size)]
            mine = torch.split(total, share)[me]
            torch.testing.assert_close(hvd.reducescatter(everyone[me], op=hvd.Sum), mine, rtol=0, atol=0)
            mean = hvd.grouped_reducescatter([everyone[me]])[0]
            torch.testing.assert_close(mean, scaled(mine, 1 / size), rtol=0, atol=0)
    assert hvd.allgather(torch.tensor(me)).tolist() == list(range(size))
    assert hvd.allgather(torch.zeros(0, 3)).shape == (0, 3)
    assert hvd.allreduce(torch.zeros(0)).shape == (0,)


def gradients() -> None:
    """Horovod's rules for gradients."""
    me, size = hvd.rank(), hvd.size()
    x = torch.arange(4.0, requires_grad=True)
    weight = torch.arange(4.0) + me
    mean_weight = torch.arange(4.0) + (size - 1) / 2
    (hvd.allreduce(x, op=hvd.Average) * weight).sum().backward()
    torch.testing.assert_close(x.grad, mean_weight)
    x.grad = None
    (hvd.allreduce(x, op=hvd.Sum, postscale_factor=3.0) * weight).sum().backward()
    torch.testing.assert_close(x.grad, mean_weight * size * 3)
    rows = torch.ones(me + 1, 2, requires_grad=True)
    hvd.allgather(rows).mul(me + 1.0).sum().backward()
    torch.testing.assert_close(rows.grad, torch.full((me + 1, 2), (size + 1) / 2))
    x.grad = None
    (hvd.broadcast(x, 1) * weight).sum().backward()
    torch.testing.assert_close(x.grad, mean_weight if me == 1 else torch.zeros(4))
    y = torch.arange(float(2 * size), requires_grad=True)
    (hvd.alltoall(y) * (me + 1)).sum().backward()
    torch.testing.assert_close(y.grad, torch.arange(1.0, size + 1).repeat_interleave(2))
    y.grad = None
    (hvd.reducescatter(y, op=hvd.Sum) * (me + 1)).sum().backward()
    torch.testing.assert_close(y.grad, size * torch.arange(1.0, size + 1).repeat_interleave(2))
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = hvd.grouped_allreduce([a, b], op=hvd.Average)
    (first.sum() + second.sum() * (me + 1)).backward()
    torch.testing.assert_close(b.grad, torch.full((3,), (size + 1) / 2))


def refusals() -> None:
    """What is wrong on one rank raises there, at once, and leaves nothing waiting."""
    x = torch.ones(4)
    for call, kind, words in (
        (lambda: hvd.allreduce(x.to(torch.complex64)), ValueError, "is not supported"),
        (lambda: hvd.allreduce(x.to(torch.int16)), ValueError, "is not supported"),
        (lambda: hvd.allreduce(torch.ones(3, 3).t()), ValueError, "required to be contiguous"),
        (lambda: hvd.allreduce(x, average=True, op=hvd.Sum), ValueError, "exclude each other"),
        (lambda: hvd.allreduce(x, op="Median"), ValueError, "unknown reduction"),
        (lambda: hvd.allreduce(torch.tensor([True])), ValueError, "not supported"),
        (lambda: hvd.broadcast(x, 9), ValueError, "not in the process set"),
        (lambda: hvd.alltoall(torch.ones(2 * hvd.size() + 1)), ValueError, "multiple"),
        (lambda: hvd.alltoall(x, torch.tensor([1] * hvd.size())), ValueError, "int32"),
        (lambda: hvd.alltoall(x, torch.tensor([9] * hvd.size(), dtype=torch.int32)), ValueError, "at most"),
        (lambda: hvd.reducescatter(x, op=hvd.Max), RuntimeError, "Average and hvd.Sum"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), ValueError, "one dim"),
        (lambda: hvd.grouped_allreduce([]), ValueError, "at least one"),
        (lambda: hvd.sparse_allreduce_async(x), ValueError, "sparse"),
        (lambda: hvd.start_timeline("x"), ValueError, "not asked for"),
        (lambda: hvd.add_process_set([0]), ValueError, "dynamic"),
        (lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0])), ValueError, "not registered"),
        (lambda: hvd.ProcessSet(["a"]), ValueError, "whole numbers"),
    ):
        with pytest.raises(kind, match=words):
            call()
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert hvd.allreduce(x, average=False).tolist() == [float(hvd.size())] * 4


def objects_and_sparse() -> None:
    me, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"rank": me, "data": [1, None]}, root_rank=1) == {"rank": 1, "data": [1, None]}
    assert hvd.allgather_object(["x"] * me) == [["x"] * rank for rank in range(size)]
    for call in (hvd.broadcast_object, hvd.allgather_object):  # an error on every rank, and the next call works
        with pytest.raises(SerializationError, match=r"rank 0: the object\[1\] cannot be sent .*function"):
            call([me, print if me == 0 else me])
    mine = torch.sparse_coo_tensor(torch.tensor([[0, me + 1]]), torch.ones(2, 3) * (me + 1), (5, 3))
    got = hvd.synchronize(hvd.sparse_allreduce_async(mine, name="s", op=hvd.Average))
    dense = sum(
        (
            torch.sparse_coo_tensor(torch.tensor([[0, r + 1]]), torch.ones(2, 3) * (r + 1), (5, 3)).to_dense()
            for r in range(size)
        ),
        torch.zeros(5, 3),
    )
    torch.testing.assert_close(got.to_dense(), dense / size)
    codec = hvd.Compression.codec("int8", warmup_steps=0)
    for index, compression in enumerate((hvd.Compression.fp16, hvd.Compression.bf16, codec)):
        x = torch.linspace(-1, 1, 4096) * (me + 1)
        expected = torch.linspace(-1, 1, 4096) * (size + 1) / 2
        got = hvd.allreduce(x, name=f"compressed {index}", compression=compression)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    with pytest.raises(AttributeError, match="powersgd"):
        _ = hvd.Compression.zip
    assert hvd.Compression.topk.config.method.startswith("topk")


def joins() -> None:
    me, size = hvd.rank(), hvd.size()
    for step in range(me + 1):
        present = [rank for rank in range(size) if step <= rank]
        got = hvd.allreduce(torch.full((3,), float(me + 1)), name=f"step{step}")
        torch.testing.assert_close(got, torch.full((3,), sum(rank + 1.0 for rank in present) / size))
    if me == size - 1:
        with pytest.raises(hvd.HorovodInternalError, match="has joined"):
            hvd.allgather(torch.ones(1))
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def adasum() -> None:
    me, size = hvd.rank(), hvd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(torch.ones(3), op=hvd.Adasum)
        return
    a, b = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, -1.0, 1.0])
    dot, na, nb = (a @ b).double(), (a @ a).double(), (b @ b).double()
    expected = (1 - dot / (2 * na)) * a + (1 - dot / (2 * nb)) * b
    torch.testing.assert_close(hvd.allreduce((a, b)[me], op=hvd.Adasum), expected.float())
    torch.testing.assert_close(hvd.allreduce(a, op=hvd.Adasum), a)  # parallel vectors count once
    assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0.0, 0.0, 0.0]


def all_of_it() -> None:
    hvd.init()
    for check in (reductions, moves, gradients, refusals, objects_and_sparse, joins, adasum):
        check()
        hvd.barrier()


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, None), (3, "gloo")])
def test_operations_equal_the_arithmetic_on_all_tensors(world: World, num_ranks: int, backend: str | None) -> None:
    world.run(all_of_it, num_ranks=num_ranks, backend=backend, timeout_s=60.0)
