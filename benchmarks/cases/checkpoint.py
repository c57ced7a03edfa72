"""Saving and loading training state on two ranks: ours against torch's DCP, torch.save and safetensors."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.block_hashes import BLOCK_BYTES, hash_of
from torsh_distributed.plan import CheckpointConfig

_TENSOR_BYTES = 8 << 20
_WARM_UP = 1
"""Saves that are not counted: the first one allocates the memory that the others reuse."""


def _state(num_bytes: int) -> dict[str, Tensor]:
    """This rank's part of the state, in tensors of 8 MB, by names of its own."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    count = max(1, num_bytes // _TENSOR_BYTES)
    return {f"rank{rank}_{number}": torch.randn(_TENSOR_BYTES // 4) for number in range(count)}


def _held(state: dict[str, Tensor]) -> dict[str, nn.Module]:
    """The same memory as buffers of a module: tensors that only one rank has belong to a module."""
    module = nn.Module()
    for name, value in state.items():
        module.register_buffer(name, value)
    return {"model": module}


def _agreed_s(seconds: float) -> float:
    """The slowest rank's."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _timed(call: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    return _agreed_s(time.perf_counter() - started)


def _manager(folder: str) -> CheckpointManager:
    section = CheckpointConfig(dir=f"{folder}/ours", keep=1, keep_best=0, verify_after_save=False)
    return CheckpointManager(section)


def _saves(folder: str, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds until each is on the disk, taken in turns; and those in which training would have waited."""
    state, rank = _state(num_bytes), dist.get_rank()
    held = _held(state)
    group = dist.new_group(backend="gloo")
    found: dict[str, list[float]] = {}

    def torch_save(number: int) -> None:
        with Path(f"{folder}/plain-{rank}-{number % 2}").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def raw(number: int) -> None:
        with Path(f"{folder}/raw-{rank}-{number % 2}").open("wb") as file:
            for value in state.values():
                file.write(memoryview(value.numpy()).cast("B"))
            file.flush()
            os.fsync(file.fileno())

    def safetensors(number: int) -> None:
        path = f"{folder}/safe-{rank}-{number % 2}"
        save_file(state, path)
        with Path(path).open("rb") as file:
            os.fsync(file.fileno())

    def async_save(number: int, pending: list[Any]) -> None:
        name = f"{folder}/dcp-async-{number % 2}"
        pending.append(dcp.async_save(state, checkpoint_id=name, process_group=group))

    with _manager(folder) as manager:
        for number in range(rounds + _WARM_UP):
            times = {
                "torsh": _timed(partial(manager.save, 2 * number + 1, held)),
                "raw": _timed(partial(raw, number)),
                "torch.save": _timed(partial(torch_save, number)),
                "safetensors": _timed(partial(safetensors, number)),
                "DCP": _timed(
                    partial(dcp.save, state, checkpoint_id=f"{folder}/dcp-{number % 2}", process_group=group)
                ),
            }
            times["torsh, stalled"] = _timed(partial(manager.save, 2 * number + 2, held, wait=False))
            manager.wait()
            pending: list[Any] = []
            times["DCP async, stalled"] = _timed(partial(async_save, number, pending))
            pending[0].result()
            if number >= _WARM_UP:
                for key, value in times.items():
                    found.setdefault(key, []).append(value)
    return found


def _loads(folder: str, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to load what `_saves` has left, from the disk if the kernel may be asked to forget it."""
    state, rank = _state(num_bytes), dist.get_rank()
    held = _held(state)
    found: dict[str, list[float]] = {}
    buffer = bytearray(BLOCK_BYTES)

    def raw() -> None:
        with Path(f"{folder}/raw-{rank}-0").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with _manager(folder) as manager:
        for _ in range(rounds):
            for key, call in (
                ("torsh", lambda: manager.load(held)),
                ("raw", raw),
                ("torch.save", lambda: torch.load(f"{folder}/plain-{rank}-0", weights_only=True)),
                ("safetensors", lambda: load_file(f"{folder}/safe-{rank}-0")),
                ("DCP", lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp-0")),
            ):
                _forget(Path(folder))
                found.setdefault(key, []).append(_timed(call))
    return found


def _forget(folder: Path) -> None:
    """Ask the kernel to drop the files from memory."""
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def _steps(folder: str, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step that computes, alone and while a checkpoint is being written; medians of each save."""
    state = _held(_state(num_bytes))
    left, right = torch.randn(768, 768), torch.randn(768, 768)

    def step() -> float:
        started = time.perf_counter()
        for _ in range(4):
            torch.mm(left, right)
        return time.perf_counter() - started

    alone, beside = [], []
    with _manager(folder) as manager:
        manager.save(1, state)
        for number in range(2, rounds + 2):
            alone.append(_agreed_s(statistics.median(step() for _ in range(30))))
            manager.save(number, state, wait=False)
            times = [step()]
            while manager.is_writing:
                times.append(step())
            beside.append(_agreed_s(statistics.median(times)))
            manager.wait()
    return {"alone": alone, "beside": beside}


def _hash_rate() -> Measurement:
    data = memoryview(bytearray(64 << 20))
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        for start in range(0, len(data), BLOCK_BYTES):
            hash_of(data[start : start + BLOCK_BYTES])
        rates.append(len(data) / (time.perf_counter() - started))
    return Measurement.of(rates)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    num_bytes, rounds = (32 << 20, 1) if budget.is_quick else (512 << 20, 5)
    size = f"{2 * num_bytes / 2**30:.3g} GB on 2 ranks"
    world = World()
    folder = tempfile.mkdtemp(dir=os.environ.get("TORSH_BENCH_DIR"))
    try:
        saves = world.run(_saves, folder, num_bytes, rounds, backend="gloo", timeout_s=600)[0]
        yield _row(f"save, {size}, until it is on the disk", saves, "torsh", ["torch.save", "safetensors", "DCP"])
        yield _rate(f"save, {size}, against writing the same bytes", saves, 2 * num_bytes)
        stalls = {
            "torsh": saves["torsh, stalled"],
            "DCP async": saves["DCP async, stalled"],
            **_only(saves, "torch.save"),
        }
        yield _row(f"save in the background, {size}: training waits", stalls, "torsh", ["DCP async", "torch.save"])
        loads = world.run(_loads, folder, num_bytes, rounds, backend="gloo", timeout_s=600)[0]
        yield _row(f"load, {size}, verified", loads, "torsh", ["torch.save", "safetensors", "DCP"])
        yield _rate(f"load, {size}, verified, against reading the same bytes", loads, 2 * num_bytes)
        steps = world.run(_steps, f"{folder}/steps", num_bytes, rounds, backend="gloo", timeout_s=600)[0]
        yield Row(
            name="a step of computing while a checkpoint is written",
            unit=Unit.SECONDS,
            ours=Measurement.of(steps["beside"]),
            rivals={"no checkpoint": Measurement.of(steps["alone"])},
        )
        yield Row(name="xxh3_128 on one core", unit=Unit.BYTES_PER_SECOND, ours=_hash_rate())
    finally:
        world.close()
        shutil.rmtree(folder)


def _only(times: dict[str, list[float]], name: str) -> dict[str, list[float]]:
    return {name: times[name]}


def _row(name: str, times: dict[str, list[float]], ours: str, rivals: list[str]) -> Row:
    return Row(
        name=name,
        unit=Unit.SECONDS,
        ours=Measurement.of(times[ours]),
        rivals={rival: Measurement.of(times[rival]) for rival in rivals},
    )


def _rate(name: str, times: dict[str, list[float]], num_bytes: int) -> Row:
    rates = {key: Measurement.of([num_bytes / one for one in times[key]]) for key in ("torsh", "raw")}
    return Row(name=name, unit=Unit.BYTES_PER_SECOND, ours=rates["torsh"], rivals={"plain files": rates["raw"]})


CASE = Case(
    title="Checkpoints",
    about="""State in tensors of 8 MB, half of it on each of two ranks, written to the same disk in turns; every
    contestant's files are flushed to the disk. Ours are hashed while they are written and verified before they are
    loaded; files are dropped from memory before a load. "Plain files" is the same bytes without a format, which is
    what the disk does. TORSH_BENCH_DIR says which disk.""",
    rows=_rows,
)
