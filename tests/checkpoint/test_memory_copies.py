"""Copies on several threads arrive whole, and say so when they cannot."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from torsh_distributed.checkpoint.memory_copies import MemoryCopies, threads_to_copy


@pytest.fixture(autouse=True)
def one_thread_of_eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launcher gives a rank that has a machine of eight cores to itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    yield
    torch.set_num_threads(before)


def _copiers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("torsh-copy")]


def test_large_and_small_strided_and_plain_arrive() -> None:
    large, small, strided = torch.randn(1 << 20), torch.randn(3), torch.randn(2048, 1024).t()
    targets = [torch.zeros_like(large), torch.zeros_like(small), torch.zeros(1024, 2048)]
    with MemoryCopies() as copies:
        for target, source in zip(targets, (large, small, strided), strict=True):
            copies.add(target, source)
    for target, source in zip(targets, (large, small, strided), strict=True):
        assert torch.equal(target, source)
    assert _copiers() == []


def test_a_source_may_change_after_the_wait() -> None:
    source = torch.ones(1 << 20)
    target = torch.zeros_like(source)
    with MemoryCopies() as copies:
        copies.add(target, source)
        copies.wait_for_threads()
        source.zero_()
    assert bool((target == 1).all())


def test_a_copy_that_fails_raises_and_leaves_no_thread() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), MemoryCopies() as copies:
        copies.add(torch.zeros(1 << 20), torch.zeros(1 << 19))
    assert _copiers() == []


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, (1 << 20) + 3, (4 << 20) - 1])
def test_bytes_arrive_whatever_their_number(num_bytes: int) -> None:
    source, target = os.urandom(num_bytes), bytearray(num_bytes + 2)
    copies = MemoryCopies()
    copies.copy_bytes(memoryview(target)[1:-1], memoryview(source))
    assert bytes(target) == b"\0" + source + b"\0"
    del copies
    for thread in _copiers():  # they end with the object
        thread.join(timeout=10)
    assert _copiers() == []


@pytest.mark.parametrize(
    ("local_world_size", "torch_threads", "expected"),
    [("1", 1, 4), ("4", 1, 2), ("8", 1, 1), ("16", 1, 1), ("", 1, 4), ("0", 1, 4), ("1", 2, 1)],
)
def test_a_rank_takes_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, local_world_size: str, torch_threads: int, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    torch.set_num_threads(torch_threads)
    assert threads_to_copy() == expected
