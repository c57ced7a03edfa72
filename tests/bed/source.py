"""The library's source, read and parsed once in a process for all tests that look at the whole of it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "torsh_distributed"


@functools.cache
def source_files() -> tuple[Path, ...]:
    """Every module, by path."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def text_of(path: Path) -> str:
    """What a file says."""
    return path.read_text()


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree, the module itself first."""
    return tuple(ast.walk(ast.parse(text_of(path))))


def tree_of(path: Path) -> ast.Module:
    """A module's syntax tree."""
    tree = nodes_of(path)[0]
    assert isinstance(tree, ast.Module)
    return tree
