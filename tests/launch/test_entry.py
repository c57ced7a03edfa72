from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torsh_distributed.errors import InvalidArgument, IoError
from torsh_distributed.launch.entry import check_entry, command_line
from torsh_distributed.launch.spec import Entry, EntryKind
from torsh_distributed.launch.worker import worker_start

START = str(Path(worker_start.__file__))


def test_a_script_a_module_and_a_command_become_command_lines() -> None:
    args = ("--lr", "0.1")
    assert command_line(Entry(target="t.py", args=args)) == [sys.executable, "-u", START, "t.py", "--lr", "0.1"]
    module = Entry(kind=EntryKind.MODULE, target="pkg.train", args=args)
    assert command_line(module) == [sys.executable, "-u", START, "-m", "pkg.train", "--lr", "0.1"]
    assert command_line(Entry(kind=EntryKind.COMMAND, target="true", args=args)) == ["true", "--lr", "0.1"]


def test_a_missing_script_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(InvalidArgument, match=r"did you mean .*train\.py"):
        check_entry(Entry(target=str(tmp_path / "tran.py")))
    with pytest.raises(InvalidArgument, match="does not exist"):
        check_entry(Entry(target=str(tmp_path / "no" / "where.py")))


def test_a_directory_needs_a_main(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="without __main__"):
        check_entry(Entry(target=str(tmp_path)))
    (tmp_path / "__main__.py").touch()
    check_entry(Entry(target=str(tmp_path)))


def test_a_script_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    # Permissions do not stop root; a path that leads through itself stops everyone.
    loop = tmp_path / "loop.py"
    script = tmp_path / "secret.py"
    script.touch(mode=0o000)
    loop.symlink_to(loop)
    with pytest.raises((InvalidArgument, IoError), match=r"does not exist|cannot be read"):
        check_entry(Entry(target=str(loop)))
    try:
        script.read_bytes()
    except PermissionError:
        with pytest.raises(IoError, match="cannot be read"):
            check_entry(Entry(target=str(script)))


def test_modules_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported by the launcher')")
    (package / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    check_entry(Entry(kind=EntryKind.MODULE, target="some_package.train"))
    check_entry(Entry(kind=EntryKind.MODULE, target="timeit"))
    check_entry(Entry(kind=EntryKind.MODULE, target="torch.distributed.run"))
    with pytest.raises(InvalidArgument, match="package without __main__"):
        check_entry(Entry(kind=EntryKind.MODULE, target="some_package"))
    with pytest.raises(InvalidArgument, match=r"no module named 'some_package\.test'"):
        check_entry(Entry(kind=EntryKind.MODULE, target="some_package.test"))
    assert "some_package" not in sys.modules


@pytest.mark.parametrize("name", ["no_such_module_here", "no_such.module.here"])
def test_an_unknown_module_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="no module named 'no_such"):
        check_entry(Entry(kind=EntryKind.MODULE, target=name))


def test_a_path_given_as_a_module_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="is not the name of a module"):
        check_entry(Entry(kind=EntryKind.MODULE, target="./train.py"))


def test_an_unknown_command_is_refused() -> None:
    check_entry(Entry(kind=EntryKind.COMMAND, target="true"))
    with pytest.raises(InvalidArgument, match="not found or not executable"):
        check_entry(Entry(kind=EntryKind.COMMAND, target="no-such-command-here"))
