"""Files for this user alone: what another user prepared is refused, and nothing is opened up by accident."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torsh_distributed.private_files import make_private_directories, open_private, read_secret

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def append(path: Path, data: bytes) -> None:
    fd = open_private(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def test_a_new_file_is_readable_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        append(tmp_path / "new", b"a")
        append(tmp_path / "new", b"b")
        made = make_private_directories(tmp_path / "base", "run", "attempt-0")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_bytes() == b"ab"
    assert mode_of(tmp_path / "new") == 0o600
    assert (mode_of(made), mode_of(made.parent)) == (0o700, 0o700)
    assert made == make_private_directories(tmp_path / "base", "run", "attempt-0")


def test_an_open_file_of_an_earlier_run_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text("old ")
    path.chmod(0o664)
    append(path, b"new")
    assert path.read_text() == "old new"
    assert mode_of(path) == 0o600


def test_what_leads_elsewhere_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "made-through-a-link")
    (tmp_path / "second-name").hardlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "second-name", "pipe"):
        with pytest.raises(OSError, match=name):
            append(tmp_path / name, b"x")
    assert target.read_text() == "mine"
    assert not (tmp_path / "made-through-a-link").exists()


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a directory"):
        make_private_directories(tmp_path, "run", "attempt-0")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@needs_root
def test_what_another_user_made_first_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o666)
    (tmp_path / "run").mkdir(0o777)
    for name in ("file", "run"):
        os.chown(tmp_path / name, NOBODY, NOBODY)
    with pytest.raises(OSError, match="belongs to another user"):
        append(tmp_path / "file", b"x")
    with pytest.raises(OSError, match="belongs to another user"):
        make_private_directories(tmp_path, "run")


def secret_in(folder: Path, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text("hush\n")
    path.chmod(mode)
    return path


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    assert read_secret(secret_in(tmp_path)) == "hush"
    for mode in (0o640, 0o604, 0o620, 0o602):
        with pytest.raises(OSError, match=rf"other users can read or write it \(mode {mode:04o}\)"):
            read_secret(secret_in(tmp_path, mode))


def test_a_secret_in_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    inner = tmp_path / "open" / "mine"
    inner.mkdir(parents=True)
    path = secret_in(inner)
    for mode in (0o777, 0o775):
        (tmp_path / "open").chmod(mode)
        with pytest.raises(OSError, match="other users can write its directory"):
            read_secret(path)
    # As in /tmp: others may add files, but not take this one away.
    (tmp_path / "open").chmod(0o1777)
    assert read_secret(path) == "hush"


def test_a_secret_behind_a_link_is_judged_where_it_is(tmp_path: Path) -> None:
    """Kubernetes mounts secrets so: token → ..data/token."""
    (tmp_path / "data").mkdir()
    (tmp_path / "token").symlink_to(secret_in(tmp_path / "data"))
    assert read_secret(tmp_path / "token") == "hush"
    (tmp_path / "data").chmod(0o777)
    with pytest.raises(OSError, match="other users can write its directory"):
        read_secret(tmp_path / "token")


@needs_root
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = secret_in(tmp_path)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(OSError, match="belongs to another user"):
        read_secret(path)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(OSError, match="its directory belongs to another user"):
        read_secret(secret_in(tmp_path / "theirs"))


def test_a_secret_is_a_file_of_some_bytes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(OSError, match="it is not a regular file"):
            read_secret(path)
    long = secret_in(tmp_path)
    long.write_text("x" * 5000)
    with pytest.raises(OSError, match="at most 4096 bytes"):
        read_secret(long)
