"""The house: folders stay small, modules have names of their own, and no import goes in a circle."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.bed.source import PACKAGE, source_files, text_of, tree_of

SOURCE = PACKAGE.parent
MOST_MODULES = 12

SAME_IDEA = {
    "base": "the interface of a family",
    "registry": "a family by name",
    "wire": "what carries a backend's bytes",
    "group": "how a backend makes a group",
    "failures": "a backend's errors in words",
    "meeting": "how a backend's ranks meet in the store",
    "rendezvous": "ranks find each other, by a store or by MPI",
    "choose": "which strategy a plan means",
    "report": "what was found, as a table",
    "torch_internals": "the private names of torch that a layer uses",
}
"""Names that several modules share, each because it is the same idea at several places."""
OF_A_SECTION = {path.stem for path in (PACKAGE / "plan" / "sections").rglob("*.py")}
"""A section of a plan is called as the part of the library that it configures."""


def modules() -> dict[str, Path]:
    found = {}
    for path in source_files():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node. Expressions hold most of a tree and no imports, so they are passed over."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, ())
        for child in inner if isinstance(inner, list) else ():
            yield child
            yield from statements(child)


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Every module of this library that `path` imports anywhere: in functions and for type checkers too."""
    for node in statements(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def test_every_folder_of_tests_is_a_package() -> None:
    """Ranks import what a test sends them by its full name."""
    tests = Path(__file__).parent
    folders = {path.parent for path in tests.rglob("*.py")}
    assert {str(folder.relative_to(tests)) for folder in folders if not (folder / "__init__.py").exists()} == set()


NOT_PLAIN = re.compile(
    r"\bof ours\b|\banew\b|\bmend(s|ed|ing)?\b|behind its back|\bworth nothing\b|'s word on\b|looks? no more\b"
    r"|(?-i:(if|that|which) (it is |they are |is |are )none\b(?! of))",
    re.IGNORECASE,
)
"""Words that a reader stumbles over; there is a common one for each."""


@pytest.mark.slow
def test_the_english_is_plain() -> None:
    root = SOURCE.parent
    texts = [path for folder, ends in PROSE.items() for end in ends for path in (root / folder).rglob(f"*{end}")]
    found = [
        f"{path.relative_to(root)}:{number} {match[0]}"
        for path in [*texts, *root.glob("*.md")]
        if path.resolve() != Path(__file__).resolve()
        if NOT_PLAIN.search(text := path.read_text())
        for number, line in enumerate(text.splitlines(), 1)
        if (match := NOT_PLAIN.search(line))
    ]
    assert found == []


PROSE = {"src": (".py", ".pyi", ".c", ".h", ".html", ".js"), "docs": (".md",), "tests": (".py",), "examples": (".py",)}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_errors_without_text_can_be_shown() -> None:
    """`assert False` says nothing, and the first of no lines is an IndexError in place of the message."""
    found = [str(path) for path in source_files() if "str(error).splitlines()[0]" in text_of(path)]
    assert not found, "errors.first_line shows the type of an error that says nothing"


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})) == {"a", "b", "c"}


@pytest.mark.slow
def test_no_import_goes_in_a_circle() -> None:
    known = modules()
    graph = {name: {other for other in imports(path, known) if other != name} for name, path in known.items()}
    assert circle_in(graph) == [], "modules import each other"


def test_no_folder_has_more_modules_than_a_reader_takes_in() -> None:
    paths = [path for path in source_files() if path.name not in ("__init__.py", "torch_internals.py")]
    sizes = collections.Counter(path.parent for path in paths if path != PACKAGE / "run.py")  # a command, as in cli
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_modules_share_a_name_only_where_they_share_an_idea() -> None:
    seen: dict[str, list[str]] = {}
    for name, path in modules().items():
        is_command = ".cli." in name or name == "torsh_distributed.run"  # called as what it runs or shows
        if path.name != "__init__.py" and not is_command:
            seen.setdefault(path.stem, []).append(name)
    twice = {stem: found for stem, found in seen.items() if len(found) > 1}
    assert {stem: found for stem, found in twice.items() if stem not in SAME_IDEA and stem not in OF_A_SECTION} == {}


@pytest.mark.slow
def test_a_type_name_means_one_thing() -> None:
    seen: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                seen.setdefault(node.name.lstrip("_"), []).append(name)
    assert {type_name: homes for type_name, homes in seen.items() if len(homes) > 1} == {}


@pytest.mark.slow
def test_every_package_says_what_lives_in_it() -> None:
    silent = [name for name, path in modules().items() if not ast.get_docstring(tree_of(path))]
    assert silent == []


NO_MODULES = {"torsh", "parallelize", "horovodrun", "with", "_", "_async", "_async_"}
"""Words in backticks in the docstrings of folders that are no modules: commands, functions, endings of names."""


def test_the_modules_that_a_folders_docstring_names_are_there() -> None:
    lost = []
    for path in PACKAGE.rglob("__init__.py"):
        for name in re.findall(r"`([a-z_]+)(?:\.py|/)?`", ast.get_docstring(tree_of(path)) or ""):
            places = (path.parent, path.parent.parent, PACKAGE)
            is_there = any((place / name).is_dir() or (place / f"{name}.py").is_file() for place in places)
            if not is_there and name not in NO_MODULES:
                lost.append(f"{path.parent.relative_to(PACKAGE)}: {name}")
    assert lost == []
