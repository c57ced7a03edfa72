"""What fits where is decided by arithmetic, before anything is sharded."""

from __future__ import annotations

import pytest
import torch

from torsh_distributed.errors import MemoryAllocationFailed
from torsh_distributed.parallel.offload.shards.shard_budget import (
    pieces_ahead,
    pieces_with_device_state,
    place_pieces,
    stored_shard_bytes,
)
from torsh_distributed.parallel.offload.storage.forms import BF16, FP32, LOSSLESS
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget
from torsh_distributed.parallel.sharded.shard_keeper import PieceShape, ShardShape

FP = torch.float32


def piece(name: str, numel: int, *, dtype: torch.dtype = FP, is_trained: bool = True) -> PieceShape:
    """One parameter over two ranks."""
    shape = ShardShape(
        name=f"{name}.weight",
        numel=numel,
        shard_numel=numel // 2,
        dtype=dtype,
        compute_dtype=dtype,
        is_trained=is_trained,
    )
    return PieceShape(name=name, params=(shape,), is_root=not name)


PIECES = [piece("", 100), piece("a", 1000), piece("b", 1000), piece("c", 1000)]


def ahead(limit: int, *, wanted: int = 8, keeps_gathered: bool = False, fixed: int = 0) -> int:
    budget = MemoryBudget("device memory", limit, setting="gpu_memory_budget_gb")
    return pieces_ahead(PIECES, budget, fixed_bytes=fixed, keeps_gathered=keeps_gathered, wanted=wanted)


def test_the_budget_limits_how_many_pieces_are_gathered_ahead() -> None:
    at_work = 400 + 4000 + 4000  # the model's own parameters, a piece, its gradients
    assert ahead(at_work) == 0
    assert ahead(at_work + 3999) == 0
    assert ahead(at_work + 4000) == 1
    assert ahead(at_work + 8000) == 2
    assert ahead(at_work + 8000, fixed=1) == 1
    assert ahead(1 << 20, wanted=1) == 1
    with pytest.raises(MemoryAllocationFailed, match="the largest piece is a"):
        ahead(at_work - 1)


def test_pieces_that_stay_gathered_must_fit_together() -> None:
    assert ahead(400 + 3 * 4000 + 4000, keeps_gathered=True, wanted=1) == 1
    with pytest.raises(MemoryAllocationFailed, match="full_shard"):
        ahead(400 + 3 * 4000 + 3999, keeps_gathered=True)


def test_storage_holds_parameters_gradients_and_moments() -> None:
    assert stored_shard_bytes([piece("a", 1000)], FP32) == 500 * 16
    assert stored_shard_bytes([piece("a", 1000)], BF16) == 500 * (4 + 4 + 2 + 2), "the parameter is its own master"
    assert stored_shard_bytes([piece("a", 1000, dtype=torch.bfloat16)], FP32) == 500 * (2 + 2 + 3 * 4)
    assert stored_shard_bytes([piece("a", 1000, is_trained=False)], FP32) == 500 * 4
    assert stored_shard_bytes([piece("a", 1000)], LOSSLESS) is None


def test_parameters_take_host_memory_before_gradients() -> None:
    shards = 4 * (50 + 3 * 500)
    places = place_pieces(PIECES, shards + 2000, has_disk=True)
    assert not any(place.are_params_on_disk for place in places.values())
    assert [place.are_grads_on_disk for place in places.values()] == [False, True, True, True]
    places = place_pieces(PIECES, 4000, has_disk=True)
    assert [place.are_params_on_disk for place in places.values()] == [False, False, True, True]
    places = place_pieces(PIECES, 4000, has_disk=False)
    assert not any(place.are_params_on_disk for place in places.values()), "refused elsewhere"


def test_a_share_of_the_pieces_keeps_its_state_on_the_device() -> None:
    assert pieces_with_device_state(PIECES, 0.0) == set()
    assert pieces_with_device_state(PIECES, 0.4) == {"", "a"}
    assert pieces_with_device_state(PIECES, 1.0) == {"", "a", "b", "c"}
