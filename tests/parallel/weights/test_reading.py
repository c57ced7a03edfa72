"""Parts of files get into memory whole: from the disk or the system's memory, at any offset, into any dtype."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.weights import reading
from torsh_distributed.parallel.weights.reading import RowRead, read_rows
from torsh_distributed.parallel.weights.safetensors_format import FileTensor

ROWS, COLUMNS = 301, 4099
PREAMBLE = 128


def values() -> Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def stored_in(path: Path, *, start: int) -> FileTensor:
    """A tensor of 5 MB behind `start` bytes of something else; on the disk, and not in the system's memory."""
    with path.open("wb") as file:
        file.write(b"x" * start)
        file.write(memoryview(values().numpy()).cast("B"))  # type: ignore[arg-type]  # an array is a buffer
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return FileTensor(path, torch.float32, (ROWS, COLUMNS), start)


@pytest.fixture(params=["disk", "memory", "no direct reads"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files are read from the disk, from the system's memory, or on a file system that has only the latter."""
    if request.param == "disk":
        yield tmp_path
        return
    if request.param == "no direct reads":
        monkeypatch.setattr(reading._WeightFile, "is_from_disk", lambda *_: False)
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


@pytest.mark.parametrize("start", [4096, 8, 4097])
def test_rows_arrive_at_any_offset(folder: Path, start: int) -> None:
    stored = stored_in(folder / "weights", start=start)
    plain = torch.empty(ROWS - 7, COLUMNS)
    half = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    columns = torch.empty(COLUMNS, ROWS).T
    file = os.memfd_create("test")
    os.ftruncate(file, PREAMBLE + plain.nbytes)
    shared = torch.frombuffer(mapped := mmap.mmap(file, PREAMBLE + plain.nbytes), dtype=torch.float32)
    shared = shared[PREAMBLE // 4 :].view(plain.shape)
    with MemoryFile(mapped, file, start=PREAMBLE) as memory:
        read_rows(
            [
                RowRead(stored, 3, ROWS - 4, plain),
                RowRead(stored, 3, ROWS - 4, shared),
                RowRead(stored, 0, ROWS, half),
                RowRead(stored, 0, ROWS, columns),
                RowRead(stored, 5, 5, torch.empty(0, COLUMNS)),
            ],
            memory,
        )
    assert torch.equal(plain, values()[3 : ROWS - 4])
    assert torch.equal(shared, values()[3 : ROWS - 4])
    assert torch.equal(half, values().to(torch.bfloat16))
    assert torch.equal(columns, values())


def test_what_is_not_in_memory_comes_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_in(tmp_path / "weights", start=8)
    through: list[int] = []
    fill = reading._WeightFile.fill

    def counted(self: reading._WeightFile, into: memoryview, offset: int) -> None:
        through.append(len(into))
        fill(self, into, offset)

    monkeypatch.setattr(reading._WeightFile, "fill", counted)
    into = torch.empty(ROWS, COLUMNS)
    monkeypatch.setattr(reading._WeightFile, "_is_in_memory", lambda *_: False)
    read_rows([RowRead(stored, 0, ROWS, into)])
    assert sum(through) == (0 if has_direct_reads(stored.file) else into.nbytes), "past the system's memory"
    assert torch.equal(into, values())
    monkeypatch.undo()
    monkeypatch.setattr(reading._WeightFile, "_fill_blocks", lambda *_: pytest.fail("it is in memory"))
    stored.file.read_bytes()
    read_rows([RowRead(stored, 0, ROWS, into.zero_())])
    assert torch.equal(into, values())


def has_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_file_system_that_refuses_direct_reads_is_read_in_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(22, "Invalid argument")

    stored = stored_in(tmp_path / "weights", start=8)
    monkeypatch.setattr(reading._WeightFile, "_fill_blocks", refuse)
    into = torch.empty(ROWS, COLUMNS)
    read_rows([RowRead(stored, 0, ROWS, into)])
    assert torch.equal(into, values())


def test_a_file_that_became_shorter_is_named(folder: Path) -> None:
    stored = stored_in(folder / "weights", start=8)
    os.truncate(stored.file, 4 * ROWS * COLUMNS - 100_000)
    with pytest.raises(CheckpointError, match="weights became shorter"):
        read_rows([RowRead(stored, 0, ROWS, torch.empty(ROWS, COLUMNS))])


def test_an_error_of_the_disk_ends_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(5, "Input/output error")

    stored = stored_in(tmp_path / "weights", start=8)
    monkeypatch.setattr(reading.os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_rows([RowRead(stored, 0, ROWS, torch.empty(ROWS, COLUMNS)) for _ in range(20)])
