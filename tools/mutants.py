"""Changes modules a little, one place at a time, and tells which changes the tests beside them do not notice.

`make mutants FILES="src/torsh_distributed/checkpoint/files/tensor_index.py"`, or a folder. A module is tried with the
tests that mirror it and start no ranks: `test_NAME.py` first, then its folder. Every mutant is a forked process
that has everything but this library imported, so one takes a second or two and leaves nothing behind. A seed
samples them. Comparisons, arithmetic, `and`, `or`, `not`, numbers and conditions are changed, calls and raises removed;
texts and what an error says are left alone. A survivor needs a test, or is no change of behaviour.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.machinery
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src" / "torsh_distributed", ROOT / "tests"
QUICK = ["-x", "-q", "--assert=plain", "-p", "no:xdist", "-m", "not ranks and not slow and not matrix"]
LIMIT_S = 20.0
"""Beyond three times what the tests take: a loop that never ends, and a busy machine."""
MOST_BYTES = 8 << 30
"""Of memory: a shape or a count may have become absurd."""

PAIRS: list[tuple[type[Any], type[Any]]] = [
    *[(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)],
    *[
        (ast.And, ast.Or),
        (ast.Add, ast.Sub),
        (ast.Mult, ast.FloorDiv),
        (ast.LShift, ast.RShift),
        (ast.BitOr, ast.BitAnd),
    ],
]
SWAPPED = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])} | dict.fromkeys(
    (ast.Div, ast.Mod, ast.Pow, ast.MatMult), ast.Mult
)
"""What an operator becomes."""
UNTOUCHED = {"annotation", "returns", "decorator_list", "type_params", "type_comment"}
"""Fields that say nothing at run time, or that would change what a class is."""


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    line: int
    change: str
    code: CodeType


def mutants_of(text: str, path: str) -> Iterator[Mutant]:
    """Every change of a module, in the order of its lines."""
    tree = ast.parse(text)
    for holder, key, node in list(places(tree)):
        for changed in changes(node):
            holder[key] = ast.copy_location(changed, node)
            code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
            holder[key] = node
            yield Mutant(node.lineno, f"{shown(node)}  ->  {shown(changed)}", code)


def places(parent: ast.AST) -> Iterator[tuple[Any, Any, Any]]:
    """Where each statement and expression stands: what holds it, under which key, and itself."""
    for field, value in ast.iter_fields(parent):
        if field in UNTOUCHED:
            continue
        inner: list[tuple[Any, Any, Any]] = [(vars(parent), field, value)]
        if isinstance(value, list):
            inner = [(value, place, one) for place, one in enumerate(value)]
        for holder, key, node in inner:
            if isinstance(node, ast.stmt | ast.expr):
                yield holder, key, node
            if isinstance(node, ast.AST) and not isinstance(node, ast.Raise | ast.JoinedStr):
                yield from places(node)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What one node may become."""
    match node:
        case ast.Compare(left, ops, comparators):
            for place, op in enumerate(ops):
                yield ast.Compare(left, [*ops[:place], SWAPPED[type(op)](), *ops[place + 1 :]], comparators)
        case ast.BinOp(left, op, right):
            yield ast.BinOp(left, SWAPPED[type(op)](), right)
        case ast.AugAssign(target, op, value):
            yield ast.AugAssign(target, SWAPPED[type(op)](), value)
            yield ast.Pass()
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPPED[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(float() as value):
            yield ast.Constant(2 * value or 1.0)
        case ast.If(ast.Name() | ast.Attribute() | ast.Call() as test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(ast.Name() | ast.Attribute() | ast.Call() as test, body, orelse):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(ast.Call()):
            yield ast.Pass()


def shown(node: ast.AST) -> str:
    """The first line of its source."""
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0][:100]


def tests_of(path: Path) -> list[str]:
    """The tests that mirror a module: its own, then those of the nearest folder that has any."""
    folder = TESTS / path.relative_to(SOURCE).parent
    while not list(folder.glob("**/test_*.py")):
        folder = folder.parent
    own = folder / f"test_{path.stem}.py"
    return [str(one) for one in (own, folder) if one.exists()]


def run(tests: list[str], limit_s: float, path: Path | None = None, code: CodeType | None = None) -> tuple[int, str]:
    """Run tests in a forked process, with a module as `code`: pytest's exit code, and the names it has imported."""
    names = os.memfd_create("names")
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        loader: Any = importlib.machinery.SourceFileLoader
        original = loader.get_code
        loader.get_code = lambda self, name: code if self.path == str(path) else original(self, name)
        status = 1  # should pytest itself fail
        try:
            status = int(pytest.main([*QUICK, *tests]))
            os.write(names, "\n".join(sys.modules).encode())
        finally:
            os._exit(status)
    with os.fdopen(os.pidfd_open(child)) as process, os.fdopen(names, "rb") as written:
        is_ended = select.select([process], [], [], limit_s)[0]
        with contextlib.suppress(ProcessLookupError):  # it may have ended before it had a group
            os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        written.seek(0)
        return status if is_ended else -signal.SIGALRM, written.read().decode()


def try_file(path: Path, chosen: list[Mutant], end: float) -> tuple[int, list[Mutant]]:
    """How many of the mutants were tried before the time was over, and which of them survived."""
    tests = tests_of(path)
    for name in run(tests, 600.0)[1].splitlines():  # what every mutant would import again
        if name.partition(".")[0] not in ("torsh_distributed", "tests", "conftest", "__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    start = time.monotonic()
    status, _ = run(tests, 600.0)
    if status != 0:
        sys.exit(f"{path.relative_to(ROOT)}: its tests fail as it is (exit code {status}): {' '.join(tests)}")
    limit_s = LIMIT_S + 3 * (time.monotonic() - start)
    tried, survivors = 0, []
    for mutant in chosen:
        if time.monotonic() > end:
            break
        tried += 1
        if run(tests, limit_s, path, mutant.code)[0] == 0:
            survivors.append(mutant)
            print(f"  {path.relative_to(SOURCE)}:{mutant.line}: {mutant.change}", flush=True)
    return tried, survivors


def main() -> None:
    """Try a sample of the mutants of some files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of the library, or a folder")
    parser.add_argument("--count", type=int, default=100, help="how many mutants to try, of all files together")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no mutant after this time")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    paths = [one for path in options.files for one in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    found = [(path.resolve(), mutant) for path in paths for mutant in mutants_of(path.read_text(), str(path.resolve()))]
    sample = sorted(random.Random(options.seed).sample(range(len(found)), min(options.count, len(found))))
    by_file: dict[Path, list[Mutant]] = {}
    for place in sample:
        by_file.setdefault(found[place][0], []).append(found[place][1])
    print_row("file", "sampled", "tried", "killed", "survived")
    sums = [0, 0, 0, 0]
    for path, chosen in by_file.items():
        tried, survivors = try_file(path, chosen, end)
        counts = [len(chosen), tried, tried - len(survivors), len(survivors)]
        sums = [before + count for before, count in zip(sums, counts, strict=True)]
        print_row(str(path.relative_to(SOURCE)), *counts)
    print_row("all", *sums)


def print_row(name: str, *cells: object) -> None:
    """One line of the table."""
    print(f"{name:52}", *(f"{cell!s:>8}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
