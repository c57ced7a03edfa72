"""Saving training state from a GPU in the background: how long training waits, against one pinned copy."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.plan import CheckpointConfig

_TENSOR_BYTES = 64 << 20
_WARM_UP = 1
"""Saves that are not counted: the first one allocates the pinned memory that the others reuse."""


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="There is no GPU here: nothing is measured.")
        return
    num_bytes, rounds = (1 << 28, 2) if budget.is_quick else (10 << 30, 5)
    count = num_bytes // _TENSOR_BYTES
    state = {f"t{number}": torch.randn(_TENSOR_BYTES // 4, device="cuda") for number in range(count)}
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    stalls: dict[str, list[float]] = {}
    folder = tempfile.mkdtemp(dir=os.environ.get("TORSH_BENCH_DIR"))
    try:
        section = CheckpointConfig(dir=f"{folder}/ours", keep=1, keep_best=0, verify_after_save=False)
        with CheckpointManager(section) as manager:
            for number in range(rounds + _WARM_UP):
                found = {"torsh": _stalled_s(manager, number, state), "one pinned copy": _copied_s(state, target)}
                found["torch.save"] = _saved_s(state, Path(folder) / "plain")
                found["DCP"] = _dcp_s(state, f"{folder}/dcp")
                for name, seconds in found.items():
                    if number >= _WARM_UP:
                        stalls.setdefault(name, []).append(seconds)
    finally:
        shutil.rmtree(folder)
    measured = {name: Measurement.of(samples) for name, samples in stalls.items()}
    yield Row(
        name=f"save {num_bytes / 2**30:g} GB from a GPU in the background: training waits",
        unit=Unit.SECONDS,
        ours=measured.pop("torsh"),
        rivals=measured,
    )


def _stalled_s(manager: CheckpointManager, number: int, state: dict[str, Tensor]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    manager.save(number + 1, state, wait=False)
    stalled_s = time.perf_counter() - started
    manager.wait()
    return stalled_s


def _copied_s(state: dict[str, Tensor], target: Tensor) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for place, value in enumerate(state.values()):
        target[place * value.nbytes : (place + 1) * value.nbytes].view(torch.float32).copy_(value, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _saved_s(state: dict[str, Tensor], path: Path) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _dcp_s(state: dict[str, Tensor], folder: str) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return time.perf_counter() - started


CASE = Case(
    title="Checkpoints from a GPU",
    about="""State in tensors of 64 MB on one GPU. Ours waits until all of it is in pinned memory, from which a thread
    writes it; "one pinned copy" is the same bytes copied there once and nothing else. torch.save and DCP's save return
    when the state is written. TORSH_BENCH_DIR says which disk.""",
    rows=_rows,
)
