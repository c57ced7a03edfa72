"""Ranks of the shared-memory core as threads of one process: `python threads_as_ranks.py CORE.so`.

A sanitizer for races sees the threads of one process and one mapping. So every rank is a thread on the same segment,
and neither torch nor the library is imported: nothing runs beside the core that the sanitizer was not built into.
"""

from __future__ import annotations

import array
import importlib.machinery
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

NUM_RANKS, SLOT_BYTES, RING_BYTES = 3, 1 << 14, 1 << 13
TIMEOUT_NS = 60 * 10**9
FLOAT, SUM = 0, 0
NUMELS = (1, 1000, 3 * SLOT_BYTES // 4 + 5)
"""One element, a part of a slot, and more than one slot holds."""
ROUNDS = 20


def load(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_core", path)
    spec = importlib.util.spec_from_file_location("_core", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def floats(values: list[float]) -> tuple[array.array[float], int]:
    """A C array and its address."""
    held = array.array("f", values)
    return held, held.buffer_info()[0]


def empty(numel: int) -> tuple[array.array[float], int]:
    return floats([0.0] * numel)


def addresses(held: list[tuple[array.array[float], int]]) -> tuple[int, ...]:
    return tuple(address for _, address in held)


def train(group: Any, rank: int, numel: int) -> None:
    """Every collective once, with its result checked."""
    everyone = range(NUM_RANKS)
    size = 4 * numel
    rest = (TIMEOUT_NS, False)
    mine, address = floats([float(rank + 1)] * numel)
    assert group.all_reduce(address, numel, FLOAT, SUM, *rest) == 0
    assert mine == array.array("f", [6.0] * numel)
    mine, address = floats([float(rank)] * numel)
    assert group.broadcast(address, size, FLOAT, 1, *rest) == 0
    assert mine == array.array("f", [1.0] * numel)
    outs = [empty(numel) for _ in everyone]
    mine, address = floats([float(rank)] * numel)
    assert group.all_gather(addresses(outs), (size,) * NUM_RANKS, address, FLOAT, *rest) == 0
    assert [one[0][-1] for one in outs] == [0.0, 1.0, 2.0]
    outs = [empty(numel) for _ in everyone]
    ins = [floats([float(10 * rank + peer)] * numel) for peer in everyone]
    sizes = (size,) * NUM_RANKS
    assert group.all_to_all(addresses(outs), sizes, addresses(ins), sizes, FLOAT, *rest) == 0
    assert [one[0][-1] for one in outs] == [rank, 10.0 + rank, 20.0 + rank]
    result, address = empty(numel)
    assert group.reduce_scatter(address, addresses(ins), (numel,) * NUM_RANKS, FLOAT, SUM, *rest) == 0
    assert result == array.array("f", [30.0 + 3 * rank] * numel)
    assert group.barrier(*rest) == 0


def exchange(group: Any, rank: int, numel: int) -> None:
    """A message around the ring of ranks."""
    after, before = (rank + 1) % NUM_RANKS, (rank - 1) % NUM_RANKS
    sent, source = floats([float(rank)] * numel)
    received, target = empty(numel)
    waiting = {1, 2}
    for number, call, address, peer in ((1, group.send, source, after), (2, group.receive, target, before)):
        receipt = call(number, address, 4 * numel, peer, 7, TIMEOUT_NS)
        assert not isinstance(receipt, int) or receipt >= 0, receipt
        if receipt is not None:
            waiting.discard(number)
    while waiting:
        receipts = group.progress(True, 10**6)
        assert not isinstance(receipts, int), receipts
        waiting -= {receipt if isinstance(receipt, int) else receipt[0] for receipt in receipts}
    assert received[-1] == before
    assert sent[0] == rank
    assert group.barrier(TIMEOUT_NS, False) == 0


def main(path: str) -> None:
    core = load(path)
    whole, backed = core.segment_bytes(NUM_RANKS, SLOT_BYTES, RING_BYTES)
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, whole)
    os.posix_fallocate(fd, 0, backed)
    segment = mmap.mmap(fd, whole)
    problems: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            group = core.Group(
                segment=segment, fd=fd, rank=rank, num_ranks=NUM_RANKS,
                slot_bytes=SLOT_BYTES, ring_bytes=RING_BYTES, spin_ns=10**5,
            )  # fmt: skip
            group.join()
            calls: list[Callable[[Any, int, int], None]] = [train, exchange]
            for _ in range(ROUNDS):
                for numel in NUMELS:
                    for call in calls:
                        call(group, rank, numel)
            group.leave()
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        sys.exit(f"{len(problems)} ranks failed")
    print(f"{NUM_RANKS} ranks, {ROUNDS} rounds of {len(NUMELS)} sizes: all results are right")


if __name__ == "__main__":
    main(sys.argv[1])
