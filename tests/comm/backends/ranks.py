"""What tests of the backends run on every rank: a group of the wanted kind, and data that differs by rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.zygote import Outcome
from torsh_distributed.comm.backends import ShmOptions, TorshProcessGroup, announce_backends
from torsh_distributed.comm.backends.shm import group as shm_group

# Torch 2.13 renamed these; 2.11 knows the old names alone.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
CORES = ("native", "portable")
SLOT_BYTES = 64 * 1024
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
ALL_DTYPES = (*FLOATING, *INTEGER, *COMPLEX, torch.bool)


def on_shm(folder: Path, core: str, function: Callable[..., Any], *args: Any, timeout_s: float = 20.0) -> Any:
    """Runs on every rank: `function(*args)` inside a shm world with that core.

    Slots are small, so that tensors of a size to test with take several chunks.
    """
    announce_backends()
    shm_group._MAX_SLOT_BYTES = shm_group._MIN_SLOT_BYTES = SLOT_BYTES
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "shm",
        store=dist.FileStore(str(folder / f"store-{core}-{size}"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=ShmOptions(core=core),  # type: ignore[arg-type]  # a value of CORES
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def the_group() -> TorshProcessGroup:
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, TorshProcessGroup)
    return group


def errors_of(outcomes: list[Outcome], *ranks: int) -> list[BaseException | None]:
    return [outcomes[rank].error for rank in ranks]


def barrier_within(timeout_s: float) -> None:
    """A barrier of the world with a deadline of its own, which only some versions of dist.barrier take."""
    group = dist.distributed_c10d._get_default_group()
    group.barrier(timeout=timedelta(seconds=timeout_s)).wait()


def data(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> Tensor:
    """Values that differ by rank and survive every dtype: small integers, bits for bool."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), values.double().flip(-1) if values.dim() else values.double()).to(dtype)
    return values.to(dtype)


def fold_reference(tensors: list[Tensor], op: dist.ReduceOp.RedOpType) -> Tensor:
    """The reduction computed locally, in a type that holds it exactly, then converted."""
    dtype = tensors[0].dtype
    if dtype.is_complex:
        wide = torch.stack([tensor.to(torch.complex128) for tensor in tensors])
    elif dtype.is_floating_point:
        wide = torch.stack([tensor.double() for tensor in tensors])
    else:
        wide = torch.stack([tensor.to(torch.int64) for tensor in tensors])
    name = str(op).rsplit(".", maxsplit=1)[-1]
    if name in ("SUM", "AVG"):
        result = wide.sum(0) / (len(tensors) if name == "AVG" else 1)
    elif name == "PRODUCT":
        result = wide.prod(0)
    elif name in ("MIN", "MAX"):
        result = wide.amin(0) if name == "MIN" else wide.amax(0)
    else:
        fold = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[name]
        result = wide[0]
        for one in wide[1:]:
            result = fold(result, one)
    return result.bool() if dtype == torch.bool else result.to(dtype)


def ops_for(dtype: torch.dtype) -> list[dist.ReduceOp.RedOpType]:
    """The c10d reductions that have a meaning for a dtype; complex products are no part of c10d."""
    kinds = dist.ReduceOp
    if dtype.is_complex:
        return [kinds.SUM, kinds.AVG]
    arithmetic = [kinds.SUM, kinds.PRODUCT, kinds.MIN, kinds.MAX]
    if dtype.is_floating_point:
        return [*arithmetic, kinds.AVG]
    means = [] if dtype == torch.bool else [kinds.AVG]
    return [*arithmetic, *means, kinds.BAND, kinds.BOR, kinds.BXOR]


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal to the last bit where arithmetic is exact; to the dtype's rounding where a mean is not."""
    assert actual.dtype == expected.dtype, what
    if actual.dtype in (torch.uint16, torch.uint32, torch.uint64):
        actual, expected = actual.to(torch.int64), expected.to(torch.int64)
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{what}: {text}")
