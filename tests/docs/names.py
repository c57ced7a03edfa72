"""Names in backticks, in docstrings and pages, and whether the code knows them.

What is checked, each by what it looks like: commands (`torsh run --elastic`), plan keys (`mesh.tp`), paths
(`comm/store`, `launch.md`), members (`Plan.load`, `td.init()`), names (`all_reduce`). Everything else in backticks
(expressions, values, output) passes. Names of others are in foreign_names.txt.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bed.source import PACKAGE, nodes_of, source_files, text_of
from tests.docs.blocks import ROOT, pages

SOURCE = ROOT / "src"
CODE = ("src", "benchmarks", "examples", "docs", "tools")
"""Folders whose Python files say which names there are. Not tests: they name what is refused, too."""
FILES = (*CODE, "tests", "constraints", ".ci", ".github")
LEFT_OUT = re.compile(r"^## Left out on purpose\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
"""The part of a decision that names what does not exist."""

FOREIGN = frozenset(re.sub(r"#.*", "", (Path(__file__).parent / "foreign_names.txt").read_text()).split())
"""Names that stand in our texts and not in our code."""

_TRIPLE = re.compile(r'(?<!["\w])r?"""(.*?)"""', re.DOTALL)
_COMMENT = re.compile(r"#.*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TICKS = re.compile(r"(?<!`)(`{1,2})(?!`)([^`\n]+(?:\n[^`\n]+)?)\1(?!`)")
_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"^(@?)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\((?:.*)\))?$", re.DOTALL)
_PATH = re.compile(r"^[A-Za-z_.][\w./-]*$")
_FILE = re.compile(r"\.(py|md|toml|txt|yml|sh|c|h|pyi|ipynb)$")


@dataclass(frozen=True)
class Mention:
    """What stands in backticks at a place."""

    page: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """Page and line, as an editor takes it."""
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page}:{self.line}"


def mentions() -> Iterator[Mention]:
    """Everything in backticks, in the docstrings of src and in the pages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from mentions_in(path)
    for path in pages():
        if path.name != "CHANGELOG.md":  # what was said at the time
            yield from mentions_in(path)


def mentions_in(path: Path) -> Iterator[Mention]:
    """Everything in backticks in one file."""
    text = path.read_text()
    if path.suffix == ".py":
        parts = [(match.start(1), match[1]) for match in _TRIPLE.finditer(text)]
    else:
        parts = [(0, _blank(_FENCED, _blank(LEFT_OUT, text)))]
    for start, part in parts:
        for match in _TICKS.finditer(part):
            line = text.count("\n", 0, start + match.start()) + 1
            yield Mention(path, line, re.sub(r"\s+", " ", match[2]).strip())


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """The text without what matches, every line where it was."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def problem_of(mention: Mention) -> str | None:
    """What is wrong with a mention; None if nothing is."""
    text = mention.text.replace("\\|", "|")
    if text.startswith("torsh ") or text == "torsh":
        return _problem_of_command(text)
    if section := re.fullmatch(r"\[([a-z_]+)\]", text):
        return None if section[1] in _plan_keys() or section[1] in _extras() else f"a plan has no section {text}"
    if assignment := re.match(r"([a-z_]+\.[a-z_]+) ?=[^=]", text):
        text = assignment[1]
    if re.fullmatch(r"--[a-z][\w-]*", text):
        return None if text in _options() | FOREIGN or _is_in_code(text) else f"no command has the option {text}"
    if "/" in text or _FILE.search(text):
        return _problem_of_path(mention, text)
    name = _NAME.match(text)
    return _problem_of_name(mention, name[2]) if name else None


# ---- commands


@functools.cache
def _root() -> Any:
    import typer

    from torsh_distributed.cli.app import app

    return typer.main.get_command(app)


def _options_of(command: Any) -> set[str]:
    declared = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return declared | {"-h", "--help", "--version", "--install-completion", "--show-completion"}


def _commands(command: Any) -> Iterator[Any]:
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from _commands(child)


@functools.cache
def _options() -> frozenset[str]:
    return frozenset(name for command in _commands(_root()) for name in _options_of(command))


def _problem_of_command(text: str) -> str | None:
    """Words lead down the commands; options up to the script or the `…` must be theirs."""
    try:
        words = shlex.split(text)[1:]
    except ValueError:
        words = text.split()[1:]
    command, path = _root(), "torsh"
    while words and hasattr(command, "commands"):
        word = words[0].rstrip(",:;")
        if word.startswith("-") or not re.fullmatch(r"[a-z][a-z0-9-]*(\|[a-z0-9-]+)*", word):
            break
        alternatives = word.split("|")
        unknown = [each for each in alternatives if each not in command.commands]
        if unknown and hasattr(command, "default_command"):
            break
        if unknown:
            return f"{path} has no command {unknown[0]}"
        words.pop(0)
        command, path = command.commands[alternatives[0]], f"{path} {alternatives[0]}"
    if hasattr(command, "default_command"):
        command = command.commands[command.default_command]
    known = _options_of(command)
    for word in words:
        if word in ("--", "…", "--as") or word.endswith(".py"):
            break  # what follows is the script's, or another launcher's
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and not option.endswith("…") and option not in known:
            return f"{path} has no option {option}"
    return None


# ---- paths


@functools.cache
def _files() -> frozenset[str]:
    """Every path of the repository and every folder, and every end of one, as in `shm/group.py`."""
    found: set[str] = set()
    for top in FILES:
        for path in (ROOT / top).rglob("*"):
            if "__pycache__" in path.parts:
                continue
            parts = path.relative_to(ROOT).parts
            found.update("/".join(parts[first:]) for first in range(len(parts)))
            if path.suffix in (".py", ".pyi"):
                found.update("/".join((*parts[first:-1], path.stem)) for first in range(len(parts)))
    return frozenset(found | {path.name for path in ROOT.iterdir()})


def _problem_of_path(mention: Mention, text: str) -> str | None:
    path = text.removeprefix("./").rstrip("/")
    if re.search(r"[A-Z]{3}", path) and path not in _files():
        return None  # launch-CLOUD.sh: a name with a gap to fill
    if not _PATH.match(path) or "://" in text or path in FOREIGN or path.split("/")[0] in FOREIGN:
        return None
    if path in _files() or _is_in_code(path) or _is_in_code(path.rsplit("/", 1)[-1]) or path in _code_of(mention.page):
        return None
    is_ours = path.split("/")[0] in _tops() or _FILE.search(path)
    return f"no file or folder is called {path}" if is_ours else None


@functools.cache
def _tops() -> frozenset[str]:
    return frozenset({*FILES, *(path.name for path in PACKAGE.iterdir() if path.is_dir())})


# ---- names


@functools.cache
def _code() -> str:
    """All of the code, without docstrings and comments."""
    texts = []
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py*"):
            if path.suffix in (".py", ".pyi") and "docs/names.py" not in str(path):
                texts.append(_TRIPLE.sub("", path.read_text()) if folder == "src" else path.read_text())
    for path in PACKAGE.rglob("native/*.[ch]"):
        texts.append(path.read_text())
    for name in ("Makefile", "pyproject.toml", ".ci/run"):
        texts.append((ROOT / name).read_text())
    return "\n".join(texts)


def _is_in_code(text: str) -> bool:
    return text in _code()


@functools.cache
def _words() -> frozenset[str]:
    """Every name and every word of a string in the code."""
    return frozenset(_WORD.findall(_code())) | frozenset(dir(builtins)) | frozenset(sys.stdlib_module_names)


def _is_ending(name: str) -> bool:
    """`_s`, `_CYCLE_TIME`: how names end, or how they go on after a first part that several share."""
    return name.startswith("_") and any(word.endswith(name) for word in _words())


@functools.cache
def _code_of(page: Path) -> str:
    """The fenced blocks of a page, which may define names of their own."""
    return "\n".join(match[0] for match in _FENCED.finditer(page.read_text())) if page.suffix == ".md" else ""


@functools.cache
def _plan_keys() -> dict[str, set[str]]:
    """Section to its keys, old spellings included."""
    from torsh_distributed.plan import Plan
    from torsh_distributed.plan.problems import keys_of
    from torsh_distributed.plan.reading.aliases import ALIASES

    found: dict[str, set[str]] = {}
    for key in (*keys_of(Plan), *ALIASES):
        section, _, name = key.partition(".")
        found.setdefault(section, set()).add(name)
    return found


@functools.cache
def _classes() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in source_files():
        for name in re.findall(r"^\s*class (\w+)", text_of(path), re.MULTILINE):
            found.setdefault(name, []).append(path)
    return found


@functools.cache
def _members(name: str) -> frozenset[str] | None:
    """What one of our classes has; None if one of its bases is foreign."""
    found: set[str] = set()
    for path in _classes()[name]:
        for node in nodes_of(path):
            if not (isinstance(node, ast.ClassDef) and node.name == name):
                continue
            for base in node.bases:
                base_name = _WORD.findall(ast.unparse(base).partition("[")[0])[-1]
                if base_name not in ("Protocol", "Generic", "ABC", "object", "NamedTuple", "Enum", "StrEnum"):
                    inherited = _members(base_name) if base_name in _classes() and base_name != name else None
                    if inherited is None:
                        return None
                    found |= inherited
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    found.add(inner.name)
                elif (
                    isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
                ):
                    found.add(inner.attr)
            for statement in node.body:
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else []
                targets += statement.targets if isinstance(statement, ast.Assign) else []
                found.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(found)


def _problem_of_name(mention: Mention, dotted: str) -> str | None:
    first, *rest = dotted.split(".")
    if dotted in FOREIGN or first in FOREIGN or dotted in _code_of(mention.page):
        return None
    if first in ("td", "torsh_distributed") and rest:
        return _problem_of_ours(dotted, rest)
    if first == "torch" and rest:
        return None if _is_in_code(dotted) or _is_importable(dotted) else f"torch has no {dotted}"
    path = dotted.replace(".", "/")
    if len(rest) == 1 and first in _plan_keys():
        is_known = rest[0] in _plan_keys()[first] or path in _files() or _is_in_code(dotted)
        return None if is_known else f"[{first}] of a plan has no key {rest[0]}"
    if rest and first in _classes():
        members = _members(first)
        if members is not None and rest[0] not in members:
            return f"{first} has no {rest[0]}"
    if path in _files() or dotted in _files():
        return None
    lost = [part for part in (first, *rest) if part not in _words() and not _is_ending(part)]
    if not rest and lost and hasattr(_torch(), first):
        return None
    return f"the code has no {lost[0]}" if lost else None


@functools.cache
def _extras() -> frozenset[str]:
    return frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def _problem_of_ours(dotted: str, rest: list[str]) -> str | None:
    """Down the packages and modules as far as they go; what follows must be in the last of them."""
    folder = PACKAGE
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    if not rest:
        return None
    file = folder / f"{rest[0]}.py"
    texts = [file] if file.exists() else [folder / "__init__.pyi", folder / "__init__.py"]
    rest = rest[1:] if file.exists() else rest
    known = {word for text in texts if text.exists() for word in _WORD.findall(text.read_text())}
    if rest and rest[0] not in known:
        return f"{dotted} does not exist"
    if len(rest) > 1 and rest[0] in _classes():
        members = _members(rest[0])
        if members is not None and rest[1] not in members:
            return f"{rest[0]} has no {rest[1]}"
    return None


@functools.cache
def _torch() -> Any:
    import torch.distributed

    return torch.distributed


def _is_importable(dotted: str) -> bool:
    """Whether a dotted name leads to something in an installed package."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False
