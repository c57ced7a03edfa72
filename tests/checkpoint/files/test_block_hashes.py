"""Hashes by block: damage has a place."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.checkpoint.files import block_hashes
from torsh_distributed.checkpoint.files.block_hashes import (
    FileDamage,
    FileRecord,
    HashedFile,
    check_file,
    damaged,
    record_of,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hashes, "BLOCK_BYTES", 100)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 350])
def test_what_is_streamed_in_any_pieces_has_the_record_of_the_whole(tmp_path: Path, size: int) -> None:
    data = bytes(number % 251 for number in range(size))
    file = HashedFile(tmp_path / "f")
    for start in range(0, size, 37):
        file.write(data[start : start + 37])
    assert file.close() == record_of(data)
    assert (tmp_path / "f").read_bytes() == data
    assert check_file(tmp_path, "f", record_of(data)) == []


@pytest.mark.usefixtures("small_blocks")
def test_damage_is_named_with_its_bytes(tmp_path: Path) -> None:
    data = bytearray(350)
    record = record_of(bytes(data))
    data[220] ^= 4
    (tmp_path / "f").write_bytes(data)
    assert [str(one) for one in check_file(tmp_path, "f", record)] == [
        "f, bytes 200 to 300: the bytes are not those that were written"
    ]
    assert check_file(tmp_path, "f", record, [0, 1, 3]) == []
    (tmp_path / "f").write_bytes(data[:120])
    assert str(check_file(tmp_path, "f", record)[0]) == "f, bytes 120 to 350: it has 120 bytes, and 350 were written"
    assert "cannot be read: no such file" in str(check_file(tmp_path, "g", record)[0])


def test_a_file_is_not_replaced_and_a_link_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            HashedFile(tmp_path / name)


def test_checkpoints_that_exist_have_blocks_of_eight_mebibytes() -> None:
    first, last = "9d6bf1a4e92df02ce881a25e37e37b19", "a6cd5e9392000f6ac44bdff4074eecdb"
    record = record_of(bytes(2**23 + 1))
    assert record.num_bytes == 2**23 + 1
    assert record.hashes == (first, last)


@pytest.mark.parametrize(("device", "number"), [("/dev/full", errno.ENOSPC), ("/dev/null", errno.EINVAL)])
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, device: str, number: int) -> None:
    """A full disk fails when it is written to, and one that cannot keep what it took only when it is waited for."""
    file, other = HashedFile(tmp_path / "f"), os.open(device, os.O_WRONLY)
    os.dup2(other, file._file)
    os.close(other)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "f"))) as caught:
        file.write(b"something")
        file.close()
    assert caught.value.errno == number
    assert caught.value.strerror == os.strerror(number)
    file.abandon()


@pytest.mark.usefixtures("small_blocks")
def test_progress_adds_up_to_the_bytes_read(tmp_path: Path) -> None:
    seen: list[int] = []
    (tmp_path / "f").write_bytes(bytes(350))
    assert check_file(tmp_path, "f", record_of(bytes(350)), progress=seen.append) == []
    assert seen == [100, 100, 100, 50]


def test_three_places_of_damage_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    places = [FileDamage(name, "differs") for name in "abcde"]
    assert "is damaged: a: differs; b: differs; c: differs; and 2 more" in str(damaged(tmp_path, places))
    assert "more" not in str(damaged(Path("step"), places[:3]))
    assert "d: differs" not in str(damaged(tmp_path, places[:4]))


@pytest.mark.parametrize("num_bytes", [-1, 2**63, 1.0, True, "1"])
def test_a_record_has_a_size_that_a_file_can_have(num_bytes: Any) -> None:
    with pytest.raises(TypeError, match="a file has bytes and hashes"):
        FileRecord.from_json({"bytes": num_bytes, "hashes": []})


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_file_that_is_ended_is_closed(tmp_path: Path, end: str) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = HashedFile(tmp_path / "data")
    file.write(b"some bytes")
    getattr(file, end)()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
