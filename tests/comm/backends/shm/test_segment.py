"""What a rank maps: a sealed memory file of its own user, at an address a member signed, and nothing else."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from torsh_distributed.comm.backends.shm.segment import (
    PREAMBLE_BYTES,
    SegmentAddress,
    SharedSegment,
    open_memory_file,
)
from torsh_distributed.comm.trust.job_secret import write_secret_file
from torsh_distributed.errors import BackendError

SIZE = PREAMBLE_BYTES + 4096


@pytest.fixture
def offered() -> Iterator[SegmentAddress]:
    segment, address = SharedSegment.create(SIZE, backed_bytes=SIZE)
    yield address
    segment.close()


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_secret_file(tmp_path / "secret", "the secret")
    monkeypatch.setenv("TORSH_SECRET_FILE", str(tmp_path / "secret"))


def test_the_ranks_of_a_job_map_the_same_memory(secret: None, offered: SegmentAddress) -> None:
    assert offered.signature is not None
    opened = SharedSegment.open(SegmentAddress(**asdict(offered)))
    opened.close()


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize("change", [{"signature": None}, {"signature": "00" * 32}, {"fd": 0}, {"size_bytes": 1}])
def test_an_address_that_no_member_signed_is_refused_unopened(offered: SegmentAddress, change: dict[str, int]) -> None:
    with pytest.raises(BackendError, match="not signed with the job's secret"):
        SharedSegment.open(replace(offered, **change))


@pytest.mark.parametrize("pid", ["1/../../tmp/file", -1, 1.5, None])
def test_an_address_is_numbers_and_no_path(offered: SegmentAddress, pid: object) -> None:
    with pytest.raises(BackendError, match="malformed"):
        SharedSegment.open(replace(offered, pid=pid))


def address_of(fd: int, token: str = "t" * 32) -> SegmentAddress:
    return SegmentAddress(pid=os.getpid(), fd=fd, token=token, size_bytes=SIZE)


def memory_file(*, sealed: bool = False, size: int = SIZE) -> int:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def refusal_of(fd: int) -> str:
    try:
        with pytest.raises(BackendError) as caught:
            SharedSegment.open(address_of(fd))
        return caught.value.message
    finally:
        os.close(fd)


def test_a_memory_file_whose_size_can_change_is_refused() -> None:
    assert "its size is not sealed" in refusal_of(memory_file())


def test_a_memory_file_of_another_size_is_refused() -> None:
    assert "it has 8 bytes" in refusal_of(memory_file(sealed=True, size=8))


def test_a_memory_file_of_another_group_is_refused() -> None:
    assert "another token" in refusal_of(memory_file(sealed=True))


def test_a_file_with_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "named"
    path.write_bytes(bytes(SIZE))
    assert "a file with a name" in refusal_of(os.open(path, os.O_RDWR))


def test_an_unlinked_file_of_a_disk_cannot_be_sealed_and_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "unlinked"
    path.write_bytes(bytes(SIZE))
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    assert "seal" in refusal_of(fd)


def test_pipes_and_devices_are_refused_without_opening_them() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert "not a regular file" in refusal_of(reading)
    assert "not a regular file" in refusal_of(os.open("/dev/null", os.O_RDWR))


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")
def test_a_memory_file_of_another_user_is_refused() -> None:
    fd = memory_file(sealed=True)
    os.fchown(fd, 65534, 65534)
    assert "it belongs to user 65534" in refusal_of(fd)


def test_a_process_that_is_gone_is_named() -> None:
    with pytest.raises(BackendError, match="cannot be opened"):
        open_memory_file("/proc/1/fd/987654", size_bytes=SIZE)


def test_nobody_can_shorten_a_segment_under_the_ranks(offered: SegmentAddress) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ftruncate(offered.fd, 0) == -1
    assert libc.ftruncate(offered.fd, 2 * SIZE) == -1
