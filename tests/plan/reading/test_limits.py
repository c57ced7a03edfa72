"""Plan files that would take minutes or gigabytes are refused at once, in every format."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.reading.limits import MAX_BYTES

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

REFUSED = {
    "an alias bomb": (".yaml", BOMB, "its aliases stand for more than 256 KB"),
    "a bomb of merges": (".yaml", MERGE_BOMB, "its aliases stand for more than 256 KB"),
    "a bomb of long text": (".yaml", f"a: &a {'x' * 30_000}\nb: [{','.join(['*a'] * 5000)}]\n", "its aliases stand"),
    "an alias of itself": (".yaml", "a: &a [*a]\n", "line 1, column 8: .*the alias a is inside what it stands for"),
    "deep YAML": (".yaml", f"a: {'[' * 30_000}", "nested more than 16 levels deep"),
    "deep YAML in blocks": (".yaml", f"a:\n {'- ' * 30_000}x", "nested more than 16 levels deep"),
    "a number in sixties": (".yaml", f"a: 1{':1' * 30_000}\n", "a number of more than 400 digits"),
    "deep JSON": (".json", f'{{"a": {"[" * 30_000}', "nested too deeply"),
    "JSON deeper than a plan": (".json", f'{{"a": {"[" * 20}{"]" * 20}}}', "nested more than 16 levels deep"),
    "a long number in JSON": (".json", f'{{"a": {"9" * 30_000}}}', "a number of more than 400 digits"),
    "keys given twice": (
        ".json",
        "{" + ",".join(f'"{number}": 1' for number in range(5000)) + ',"4999": 1}',
        "4999 is given twice",
    ),
    "deep TOML": (".toml", f"a = {'[' * 30_000}", "nested too deeply"),
    "a dotted key": (".toml", f"{'.'.join(['a'] * 30_000)} = 1\n", "line 1, column 1: .*a key of more than 64 parts"),
    "a dotted header": (".toml", f"x = 1\n[{'.'.join(['a'] * 30_000)}]\n", "line 2, column 2: .*a key of more than 64"),
    "a dotted key of quoted parts": (".toml", f"""{'."a" .'.join(["'b'"] * 7_000)} = 1\n""", "a key of more than 64"),
    "quotes without end": (".toml", "a = " + '"\\"' * 20_000, "not valid TOML"),
    "spaces and dots": (".toml", "a = " + "x . " * 60 + " " * 30_000 + "b . " * 60, "not valid TOML"),
    "TOML deeper than a plan": (".toml", f"a = {'[' * 20}{']' * 20}\n", "nested more than 16 levels deep"),
    "a long number in TOML": (".toml", f"a = {'9' * 30_000}\n", "integer string conversion"),
    "a large TOML file": (".toml", "# \n" * MAX_BYTES, "a plan has at most 64 KB, and this file is larger"),
    "a large JSON file": (".json", " " * (MAX_BYTES + 1), "a plan has at most 64 KB"),
    "a large YAML file": (".yml", "# \n" * MAX_BYTES, "a plan has at most 64 KB"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_would_take_long_is_refused_at_once(case: str, tmp_path: Path) -> None:
    suffix, text, message = REFUSED[case]
    path = tmp_path / f"plan{suffix}"
    path.write_text(text)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ConfigurationError, match=message):
        Plan.load(path)
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Processor time, not the clock's: a busy machine does not matter.
    assert after.ru_utime - before.ru_utime < 3.0
    assert after.ru_maxrss - before.ru_maxrss < 100_000, "kilobytes"


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe, endless = tmp_path / "pipe.toml", tmp_path / "endless.toml"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    for path in (pipe, endless):
        with pytest.raises(ConfigurationError, match="a plan is a regular file"):
            Plan.load(path)


def test_values_of_variables_and_command_lines_have_the_same_limits() -> None:
    for text in ("[" * 30_000, "9" * 30_000, f"1\n{'.'.join(['a'] * 20_000)} = 1"):
        with pytest.raises(ConfigurationError, match=r"training\.steps"):
            Plan.compose(command_line=[f"training.steps={text}"])


def test_aliases_that_stay_small_still_work(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("training: &t\n  steps: &n 7\n  batch_size: *n\nmesh:\n  dp: 1\n")
    assert Plan.load(path).training.batch_size == 7
