"""Code in the docs works: python blocks run, `torsh` lines are commands with options that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.bed.programs import be_program
from tests.bed.world import World
from tests.docs.blocks import ROOT, Block, blocks_of, pages, programs, torsh_commands
from torsh_distributed.cli.app import app

pytestmark = pytest.mark.ranks

IN_AN_INTERPRETER = ("README.md", "mpi.md")
"""Pages whose programs start from nothing: what a newcomer runs first, and MPI, which knows its processes."""
PAGES_WITH_CODE = [page for page in pages() if programs(list(blocks_of(page)))]
COMMANDS = [
    pytest.param(words, id=f"{block.place} torsh {' '.join(words[:3])}")
    for page in pages()
    for block in blocks_of(page)
    if block.language in ("bash", "console", "sh", "shell")
    for words in torsh_commands(block)
]


def check_command(words: list[str]) -> None:
    """Walk down the commands as the words say, then let the last one parse its own; nothing is run."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if words and hasattr(command, "default_command"):
        command = command.commands[command.default_command]
    if words and words[0] not in ("-h", "--help", "--version") and hasattr(command, "commands"):
        raise AssertionError(f"torsh has no command {words[0]!r} there; it has {', '.join(command.commands)}")
    if not {"-h", "--help", "--version"} & set(words):
        command.make_context(command.name, words)


def is_value_of_a_placeholder(error: Exception) -> bool:
    """`--nproc-per-node N` or a file that does not exist here: the option is right, its value stands for another."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return "BadParameter" in kinds and "MissingParameter" not in kinds


def write_program(blocks: list[Block], folder: Path, name: str) -> None:
    (folder / name).write_text("".join(block.source for block in blocks))


def run_forked(world: World, blocks: list[Block], folder: Path, name: str) -> None:
    """Run the program in a process forked from one that has imported torch, instead of importing it again."""
    write_program(blocks, folder, name)
    (outcome,) = world.outcomes(be_program, folder / name, num_ranks=1, backend=None, timeout_s=100)
    assert outcome.is_ok, f"{blocks[0].place} failed:\n{outcome.output}{outcome.trace}{outcome.stacks}"


def run_fresh(blocks: list[Block], folder: Path, name: str) -> None:
    """Run the program as a reader does, in an interpreter of its own."""
    write_program(blocks, folder, name)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{blocks[0].place} failed:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path, world: World) -> None:
    blocks = list(blocks_of(page))
    for block in blocks:
        if block.title:
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.title).write_text(block.source)
    for number, program in enumerate(programs(blocks)):
        name = program[0].title or f"block_{number}.py"
        if page.name in IN_AN_INTERPRETER:
            run_fresh(program, tmp_path, name)
        else:
            run_forked(world, program, tmp_path, name)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_torsh_command_in_the_docs_exists(words: list[str]) -> None:
    try:
        check_command(words)
    except Exception as error:
        if not is_value_of_a_placeholder(error):
            raise


def test_a_block_left_out_says_why() -> None:
    for page in pages():
        for block in blocks_of(page):
            assert block.mark != "no-run" or block.reason, f"{block.place}: write <!-- no-run: reason -->"


# ---- the tools themselves


def page_with(tmp_path: Path, text: str) -> list[Block]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return list(blocks_of(page))


def test_blocks_are_found_with_language_title_and_mark(tmp_path: Path) -> None:
    first, second, third = page_with(
        tmp_path,
        '# Page\n\n```toml title="plan.toml"\na = 1\n```\n\n<!-- no-run: needs a cluster -->\n```python\nx = 1\n```\n'
        "1. in a list\n\n    ```bash\n    torsh env\n    ```\n",
    )
    assert (first.language, first.title, first.source) == ("toml", "plan.toml", "a = 1\n")
    assert (second.language, second.mark, second.reason, second.line) == ("python", "no-run", "needs a cluster", 8)
    assert (third.language, third.source) == ("bash", "torsh env\n")


def test_a_block_that_is_never_closed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never closed"):
        page_with(tmp_path, "```python\nx = 1\n")


def test_a_block_runs_alone_unless_it_continues(tmp_path: Path) -> None:
    text = "```python\nx = 1\n```\n<!-- continues -->\n```python\nassert x == 1\n```\n```python\ny = 2\n```\n"
    assert [[block.line for block in program] for program in programs(page_with(tmp_path, text))] == [[1, 5], [8]]


def test_a_failing_block_is_named_with_its_line(tmp_path: Path, world: World) -> None:
    blocks = page_with(tmp_path, "\n```python\nraise ValueError('as told')\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:2 failed:(?s:.*)as told"):
        run_fresh(blocks, tmp_path, "block.py")
    with pytest.raises(AssertionError, match=r"page\.md:2 failed:(?s:.*)as told"):
        run_forked(world, blocks, tmp_path, "block.py")


def test_a_program_in_a_fork_is_alone_and_strict(tmp_path: Path, world: World) -> None:
    for source, failure in (
        ("import os\nassert 'RANK' not in os.environ\nassert __name__ == '__main__'", None),
        ("import warnings\nwarnings.warn('old', DeprecationWarning)", "DeprecationWarning: old"),
    ):
        blocks = page_with(tmp_path, f"```python\n{source}\n```\n")
        if failure is None:
            run_forked(world, blocks, tmp_path, "block.py")
        else:
            with pytest.raises(AssertionError, match=failure):
                run_forked(world, blocks, tmp_path, "block.py")


def test_commands_are_found_in_shell_blocks(tmp_path: Path) -> None:
    (block,) = page_with(
        tmp_path,
        "```console\n$ torsh env | head  # a comment\nX=1 torsh run \\\n  -m pkg && torsh plan show p.toml > out\n"
        "torsh run …\nls torsh\n```\n",
    )
    assert list(torsh_commands(block)) == [["env"], ["run", "-m", "pkg"], ["plan", "show", "p.toml"]]


@pytest.mark.parametrize("words", [["fly"], ["run", "--no-such-option", "x.py"], ["plan", "burn"], ["run"]])
def test_a_wrong_command_is_refused(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"no command|No such option|Missing") as caught:
        check_command(words)
    assert not is_value_of_a_placeholder(caught.value)
