"""The file of a secret: made for one user, and not believed if another could have read or written it."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torsh_distributed.comm.trust.job_secret import (
    is_signed,
    job_secret,
    read_or_create_secret_file,
    read_secret_file,
    sign,
    write_secret_file,
)
from torsh_distributed.errors import InvalidArgument, IoError


def test_a_missing_file_is_created_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    secret = read_or_create_secret_file(path)
    assert len(secret) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_create_secret_file(path) == secret
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]


def test_nodes_that_create_it_at_once_read_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: read_or_create_secret_file(tmp_path / "token"), range(32)))
    assert len(found) == 1


def test_a_link_in_its_place_is_not_followed_when_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_secret_file(tmp_path / "secret", "s")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    with pytest.raises(IoError, match="other users can read or write it") as caught:
        read_secret_file(path)
    assert "chmod 600" in str(caught.value)


def test_a_directory_that_others_can_write_is_refused_unless_sticky(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_secret_file(path, "s")
    tmp_path.chmod(0o777)
    with pytest.raises(IoError, match="other users can write its directory"):
        read_secret_file(path)
    tmp_path.chmod(0o1777)
    assert read_secret_file(path) == "s"


def test_what_is_no_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="No such file"):
        read_secret_file(tmp_path / "missing")
    for content, reason in ((b"", "empty"), (b"\xff\xfe", "can't decode"), (b"x" * 5000, "at most 4096 bytes")):
        path = tmp_path / "token"
        path.unlink(missing_ok=True)
        path.touch(0o600)
        path.write_bytes(content)
        with pytest.raises((InvalidArgument, IoError), match=reason):
            read_secret_file(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(IoError, match="regular file"):
        read_secret_file(tmp_path / "pipe")


def test_a_process_finds_the_file_first_then_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORSH_SECRET_FILE", raising=False)
    monkeypatch.delenv("TORSH_JOB_TOKEN", raising=False)
    assert job_secret() is None
    monkeypatch.setenv("TORSH_JOB_TOKEN", "variable")
    assert job_secret() == b"variable"
    write_secret_file(tmp_path / "secret", "file")
    monkeypatch.setenv("TORSH_SECRET_FILE", str(tmp_path / "secret"))
    assert job_secret() == b"file"
    (tmp_path / "secret").unlink()
    assert job_secret() == b"file"


def test_signatures_hold_for_one_purpose_and_message() -> None:
    signature = sign(b"s", "segment", b"1 2 3")
    assert is_signed(b"s", "segment", b"1 2 3", signature)
    assert not is_signed(b"t", "segment", b"1 2 3", signature)
    assert not is_signed(b"s", "other", b"1 2 3", signature)
    assert not is_signed(b"s", "segment", b"1 2 4", signature)
    assert not is_signed(b"s", "segment", b"1 2 3", None)
