"""The table of variables: the code reads and sets what is in it, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.bed.source import PACKAGE, nodes_of, source_files
from torsh_distributed import known_variables
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.known_variables import KNOWN, REMOVED, RENAMED

ROOT = Path(__file__).parents[1]
READS = {"get", "pop", "setdefault"}
ALIKE = re.compile(
    r"(TORSH|SLURM|OMPI|PMIX?|PBS|NCCL|GLOO|TORCH|TORCHELASTIC|HOROVOD|DEEPSPEED|RAY|KUBERNETES|PET|CUDA|OMP|MASTER)"
    r"(_[A-Z0-9]+)+"
)
NOT_VARIABLES = {"TORCH_DISTRIBUTED_DEFAULT_PORT", "DEEPSPEED_OPTIMIZERS", "GLOO_DEVICE_TRANSPORT_TCP_TLS"}
"""Constants of DeepSpeed's; the beginning of names that gloo has for its certificates."""


def modules() -> dict[str, tuple[ast.AST, ...]]:
    """The nodes of every module but the table's."""
    paths = [path for path in source_files() if path.name != "known_variables.py"]
    return {str(path.relative_to(PACKAGE)): nodes_of(path) for path in paths}


def is_environment(node: ast.AST) -> bool:
    return last_name(node) in ("environ", "_environ")


def last_name(node: ast.AST) -> str:
    """`environ` of `os.environ` and of `given or os.environ`. Plain names first: writing out code takes long."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ast.unparse(node).rpartition(".")[2]


def names_read(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Literals that an environment is asked for, by any of the ways to ask."""
    for node in nodes:
        asked: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if (
                (node.func.attr in READS and is_environment(node.func.value))
                or node.func.attr == "getenv"
                or last_name(node.func.value) == "known_variables"
            ):
                asked = node.args[0]
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            asked = node.slice
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            asked = node.left
        elif isinstance(node, ast.keyword) and node.arg == "envvar":
            asked = node.value
        if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
            yield asked.lineno, asked.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ALIKE.fullmatch(node.value):
            yield node.lineno, node.value


@pytest.mark.slow
def test_every_variable_in_the_code_is_in_the_table() -> None:
    known = {*KNOWN, *RENAMED, *REMOVED, *NOT_VARIABLES}
    found = {
        f"{home}: {name}" for home, nodes in modules().items() for _, name in names_read(nodes) if name not in known
    }
    assert found == set()


@pytest.mark.slow
def test_every_variable_of_ours_is_used() -> None:
    used = {name for nodes in modules().values() for _, name in names_read(nodes)}
    in_c = " ".join(path.read_text() for path in PACKAGE.rglob("*.c"))
    updates = {
        keyword.arg
        for nodes in modules().values()
        for node in nodes
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }
    ours = {name for name in KNOWN if name.startswith("TORSH_")}
    assert {name for name in ours if name not in used | updates and name not in in_c} == set()


@pytest.mark.slow
def test_a_default_is_written_in_the_table_alone() -> None:
    """An empty default is none: it says that unset and empty are the same."""
    second = [
        f"{home}:{node.lineno} {ast.unparse(node)}"
        for home, nodes in modules().items()
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and is_environment(node.func.value)
        and len(node.args) == 2
        and isinstance(node.args[1], ast.Constant)
        and node.args[1].value not in ("", "?", "{}")
    ]
    assert second == []


def test_the_page_is_the_table() -> None:
    page = (ROOT / "docs/reference/variables.md").read_text()
    assert page == known_variables.render_page(), "run `torsh env --reference > docs/reference/variables.md`"


def test_a_name_is_in_one_section_and_old_names_are_in_none() -> None:
    listed = [one.name for section in known_variables.SECTIONS.values() for one in section]
    assert len(listed) == len(KNOWN)
    assert not {*RENAMED, *REMOVED} & set(KNOWN)


def test_reading_takes_the_default_for_unset_and_empty() -> None:
    assert known_variables.whole_number("LOCAL_WORLD_SIZE", {}) == 1
    assert known_variables.whole_number("LOCAL_WORLD_SIZE", {"LOCAL_WORLD_SIZE": ""}) == 1
    assert known_variables.whole_number("LOCAL_WORLD_SIZE", {"LOCAL_WORLD_SIZE": "4"}) == 4
    assert known_variables.number("TORSH_NEWS_TIMEOUT_S", {"TORSH_NEWS_TIMEOUT_S": "2.5"}) == 2.5
    assert known_variables.is_on("TORSH_DEBUG", {"TORSH_DEBUG": "1"})
    assert not known_variables.is_on("TORSH_DEBUG", {"TORSH_DEBUG": "0"})


@pytest.mark.parametrize("value", ["x", "-1", "inf", "nan"])
def test_a_value_that_is_no_number_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError, match="TORSH_NEWS_TIMEOUT_S must be a number"):
        known_variables.number("TORSH_NEWS_TIMEOUT_S", {"TORSH_NEWS_TIMEOUT_S": value})
    with pytest.raises(ConfigurationError, match="LOCAL_RANK must be a whole number"):
        known_variables.whole_number("LOCAL_RANK", {"LOCAL_RANK": "one"})
