"""Tiered storage: arrays go to disk when host memory is full, and take the bytes of their form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.parallel.offload.storage.forms import BF16, FORMS, FP32
from torsh_distributed.parallel.offload.storage.tiered_storage import StatePiece, TieredStorage, cut, overlaps
from torsh_distributed.parallel.offload.storage.tiers import DiskTier, HostTier


def test_the_disk_holds_what_host_memory_cannot(tmp_path: Path) -> None:
    storage = TieredStorage(HostTier(4000, is_pinned=False), DiskTier(tmp_path, 1 << 20))
    values = torch.randn(900)
    arrays = [storage.add(f"array {n}", 900, role="param", form=FP32) for n in range(3)]
    for array in arrays:
        storage.save(array, values)
    assert [array.is_on_disk for array in arrays] == [False, True, True]
    assert storage.disk is not None
    assert storage.disk.file_bytes == storage.disk.budget.used_bytes == 8192
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    for array in arrays:
        assert torch.equal(storage.load(array), values)
    assert storage.traffic.disk_written_bytes == storage.traffic.disk_read_bytes == 7200
    storage.close()


@pytest.mark.parametrize("name", sorted(FORMS))
def test_an_array_takes_the_bytes_of_its_form(name: str) -> None:
    storage = TieredStorage(HostTier(1 << 20, is_pinned=False), None)
    array = storage.add("weights", 4096, role="param", form=FORMS[name])
    storage.save(array, torch.randn(4096) * 0.02)
    sizes = {"none": 16384, "fp16": 8192, "bf16": 8192, "int8": 4096 + 64}
    assert storage.host.budget.used_bytes == storage.stored_bytes == array.payload.numel()
    if name in sizes:
        assert storage.stored_bytes == sizes[name]
    else:
        assert storage.stored_bytes < 0.95 * 16384
    storage.close()


def test_an_array_keeps_its_values_when_it_moves_to_disk_or_changes_its_form(tmp_path: Path) -> None:
    storage = TieredStorage(HostTier(1 << 20, is_pinned=False), DiskTier(tmp_path, 1 << 20))
    values = torch.arange(1024.0) / 8  # exact in bf16 up to 32
    array = storage.add("weights", 1024, role="moment", form=FP32)
    storage.save(array, values)
    storage.change_form(array, BF16)
    assert storage.host.budget.used_bytes == 2048
    torch.testing.assert_close(storage.load(array), values, rtol=2**-8, atol=0)
    held = storage.load(array).clone()
    storage.move_to_disk(array)
    assert array.is_on_disk
    assert storage.host.budget.used_bytes == 0
    assert torch.equal(storage.load(array), held)
    storage.close()


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 40))
def test_a_cut_covers_the_range_in_order(start: int, numel: int, max_numel: int) -> None:
    ranges = cut(start, start + numel, max_numel)
    assert [index for low, high in ranges for index in range(low, high)] == list(range(start, start + numel))
    assert all(0 < high - low <= max_numel for low, high in ranges)


@given(st.integers(1, 40), st.integers(0, 100), st.integers(0, 100))
def test_overlaps_are_the_elements_of_the_range_by_piece(max_numel: int, start: int, numel: int) -> None:
    pieces = [StatePiece(low, high) for low, high in cut(0, 200, max_numel)]
    found = overlaps(pieces, start, start + numel)
    assert [index for _, low, high in found for index in range(low, high)] == list(range(start, start + numel))
    assert all(piece.start <= low < high <= piece.stop for piece, low, high in found)
