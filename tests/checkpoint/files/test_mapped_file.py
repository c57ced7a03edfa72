"""A file that is read from the disk once: the same bytes, mapped or not, and errors instead of a process that ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torsh_distributed.checkpoint.files import mapped_file
from torsh_distributed.checkpoint.files.mapped_file import MappedFile, read_exactly
from torsh_distributed.checkpoint.memory_copies import MemoryCopies

DATA = os.urandom(3 * 4096 + 17)


@pytest.fixture(params=["mapped", "no mapping here", "no populating here"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MappedFile:
    if request.param == "no mapping here":
        monkeypatch.setattr(mapped_file, "_mapped", lambda file, num_bytes: None)
    if request.param == "no populating here":  # an older kernel refuses what it does not know
        monkeypatch.setattr(mapped_file, "_POPULATE_READ", 999)
    (tmp_path / "f").write_bytes(DATA)
    return MappedFile(tmp_path / "f")


def test_any_part_of_it_can_be_looked_at_and_copied(file: MappedFile) -> None:
    assert file.num_bytes == len(DATA)
    for start, stop in ((0, len(DATA)), (1, 2), (4095, 4097), (5000, len(DATA)), (7, 7)):
        file.start_reading(start, stop)
        assert bytes(file.view(start, stop)) == DATA[start:stop]
        into = bytearray(stop - start)
        file.read_into(memoryview(into), start, MemoryCopies().copy_bytes)
        assert into == DATA[start:stop]


def test_a_disk_that_gives_a_few_bytes_at_a_time_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(DATA)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, start: read(file, [buffers[0][:5]], start))
    into = bytearray(23)
    with (tmp_path / "f").open("rb") as opened:
        read_exactly(opened.fileno(), memoryview(into), 11)
    assert into == DATA[11:34]


def test_a_file_that_was_cut_after_it_was_opened_is_an_error(file: MappedFile, tmp_path: Path) -> None:
    """Touching such a page would end the process with SIGBUS."""
    os.truncate(tmp_path / "f", 4096)
    with pytest.raises(OSError, match="ends at byte 8192"):
        file.view(8192, 8200)
    with pytest.raises(OSError, match="ends at byte 4096"):
        file.read_into(memoryview(bytearray(5000)), 0, MemoryCopies().copy_bytes)
    assert bytes(file.view(0, 4096)) == DATA[:4096]
    with pytest.raises(OSError, match="ends at byte"):
        file.view(len(DATA), len(DATA) + 1)


def test_links_are_not_followed_and_empty_files_are_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert bytes(MappedFile(tmp_path / "empty").view(0, 0)) == b""
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(OSError, match="symbolic links"):
        MappedFile(tmp_path / "link")
