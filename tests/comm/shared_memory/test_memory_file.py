"""Shared memory that is filled through its file holds what was written, also after the file is closed."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from torsh_distributed.comm.shared_memory.memory_file import MemoryFile

START = 128


def test_what_is_written_through_the_file_is_in_the_memory() -> None:
    file = os.memfd_create("test")
    os.ftruncate(file, START + 1000)
    values = torch.frombuffer(mapped := mmap.mmap(file, START + 1000), dtype=torch.uint8)
    with MemoryFile(mapped, file, start=START) as memory:
        assert memory.place_of(values[START:]) == 0
        assert memory.place_of(values[START + 7 : START + 9]) == 7
        assert memory.place_of(values) is None, "it begins before the memory"
        assert memory.place_of(torch.empty(8)) is None
        memory.write(memoryview(b"torsh"), 7)
    assert bytes(memory.memory[6:13]) == b"\0torsh\0"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
