"""Plan files: malformed ones are placed, unreadable ones named, writing is atomic."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError, IoError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.reading.files import read, write_atomically


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.toml", b"[mesh]\ndp = = 2\n", "line 2, column 6: not valid TOML: Invalid value"),
        ("p.toml", b"[mesh]\ndp = 2\ndp = 3\n", "line 3, column 7: not valid TOML: Cannot overwrite a value"),
        ("p.toml", b'[mesh]\ndp = "2', "line 2, column 8: not valid TOML: Unterminated string"),
        ("p.toml", b"[mesh]\nd\xffp = 2\n", "line 2, column 2: not valid TOML: byte 0xff is not UTF-8"),
        ("p.json", b'{"mesh":\n {"dp" 2}}', "line 2, column 8: not valid JSON: Expecting ':' delimiter"),
        ("p.json", b"", "line 1, column 1: not valid JSON: Expecting value"),
        ("p.json", b'{"mesh": {"dp": 2, "dp": 3}}', "p.json: not valid JSON: the key dp is given twice"),
        ("p.json", b'{"training": {"learning_rate": NaN}}', "p.json: not valid JSON: NaN is not a JSON number"),
        ("p.json", b"[" * 50_000, "p.json: not valid JSON: nested too deeply"),
        ("p.yaml", b"mesh:\n  dp: 2\n dp: 3\n", "line 3, column 2: not valid YAML: "),
        ("p.yaml", b"mesh:\n  dp: 2\n  dp: 3\n", "line 3, column 3: not valid YAML: the key dp is given twice"),
        ("p.yaml", b"mesh: {dp: \x07}\n", "line 1, column 12: not valid YAML: special characters are not allowed"),
        ("p.yml", b"mesh: !!python/object:os.system {}\n", "line 1, column 7: not valid YML: could not determine a "),
        ("p.yaml", b"mesh: {dp: 2024-99-99}\n", "p.yaml: not valid YAML: month must be in 1..12"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        read(path)
    assert caught.value.message.startswith(str(path))
    assert message in caught.value.message


@pytest.mark.parametrize(("name", "content"), [("p.json", "[1, 2]"), ("p.yaml", "- mesh")])
def test_a_file_of_something_else_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match="a plan is a table of sections, but this file holds a list"):
        read(tmp_path / name)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"there is no plan file {tmp_path}/absent.toml"):
        Plan.load(tmp_path / "absent.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigurationError, match=r"folder\.toml cannot be read: Is a directory"):
        Plan.load(tmp_path / "folder.toml")


@pytest.mark.parametrize("name", ["plan.ini", "plan"])
def test_an_unknown_suffix_is_refused_for_reading_and_writing(tmp_path: Path, name: str) -> None:
    for act in (Plan.load, Plan().save):
        with pytest.raises(ConfigurationError, match=r"is not one of \.toml, \.json, \.yaml, \.yml"):
            act(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.toml", ""),
        ("p.yaml", "# nothing yet\n"),
        ("p.yaml", "mesh:\ntraining:\n"),
        ("p.json", "{}"),
        ("p.toml", "\ufeff[mesh]\n"),
    ],
)
def test_a_file_that_sets_nothing_is_the_default_plan(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert Plan.load(tmp_path / name) == Plan()


@pytest.mark.parametrize("number", ["1e-3", "0.001", "1.0e-03", ".001"])
def test_yaml_numbers_are_read_as_people_write_them(tmp_path: Path, number: str) -> None:
    (tmp_path / "p.yml").write_text(f"training:\n  learning_rate: {number}\n")
    assert Plan.load(tmp_path / "p.yml").training.learning_rate == 0.001


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    plan = Plan.from_dict({"checkpoint": {"dir": "1e-3"}, "fsdp": {"wrap_names": ["yes", "2024-01-01"]}})
    for suffix in ("toml", "json", "yaml"):
        plan.save(tmp_path / f"p.{suffix}")
        assert Plan.load(tmp_path / f"p.{suffix}") == plan


def test_saving_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("old")
    path.chmod(0o640)
    with path.open() as old:
        Plan(dp=2).save(path)
        assert old.read() == "old"  # a reader keeps the file it opened: nothing was written into it
    assert Plan.load(path) == Plan(dp=2)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]


def test_a_new_file_is_readable_as_the_umask_allows(tmp_path: Path) -> None:
    Plan().save(tmp_path / "plan.toml")
    (tmp_path / "other").touch()
    assert (tmp_path / "plan.toml").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    (tmp_path / "target.toml").mkdir()  # a rename onto a directory fails after the temporary file was written
    with pytest.raises(IoError, match=r"target\.toml cannot be written: Is a directory"):
        write_atomically(tmp_path / "target.toml", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["target.toml"]
    with pytest.raises(IoError, match="cannot be written: No such file or directory"):
        Plan().save(tmp_path / "absent" / "plan.toml")
