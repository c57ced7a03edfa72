"""Private names of torch: each is there with the signature that we call, and none is used unlisted.

A torch that changed one fails here, in a case with its name. `tests/torch_internals.txt` has the parameters: what comes
later in a signature must have a default; `-` is a type that we never make. `python -m tests.test_torch_internals`
writes it for the torch at hand; cut a line to the parameters that all supported versions have.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bed.source import PACKAGE, nodes_of, source_files, tree_of

FROZEN = Path(__file__).with_name("torch_internals.txt")
LAYERS = sorted(path.parent.name for path in PACKAGE.glob("*/torch_internals.py"))

OF_OTHERS = {
    "_asdict": "namedtuple",
    "_attn_implementation": "transformers",
    "_attn_implementation_internal": "transformers",
    "_current_exceptions": "sys",
    "_current_frames": "sys",
    "_exit": "os",
    "_experts_implementation": "transformers",
    "_field_defaults": "namedtuple",
    "_fields": "namedtuple",
    "_getframe": "sys",
    "_global_mapping": "transformers",
    "_init_weights": "transformers",
    "_initializing": "importlib",
    "_keys_to_ignore_on_load_unexpected": "transformers",
    "_make": "namedtuple",
    "_module_classes": "torch: an argument of users' own policies, which may lack it",
    "_no_split_modules": "transformers",
    "_replace": "namedtuple",
    "_run_module_as_main": "runpy",
    "_step_supports_amp_scaling": "optimizers declare it",
    "_to_sync": "torchmetrics",
    "_torchdynamo_disable": "set by torch.compiler.disable on what it wraps",
    "_update_count": "torchmetrics",
}
"""Private names that are not torch's to keep, and whose they are."""

NO_TORCH = ("self", "cls", "torch_internals")
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


def listed_in(layer: str) -> Iterator[str]:
    """Every name of a layer, by its path: those of the stub, then the members."""
    stub = PACKAGE / layer / "torch_internals.pyi"
    if stub.exists():
        for node in tree_of(stub).body:
            if isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
    yield from members_of(layer)


def members_of(layer: str) -> Iterator[str]:
    for node in tree_of(PACKAGE / layer / "torch_internals.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MEMBERS":
            yield from ast.literal_eval(node.value)


def find(path: str) -> Any:
    """What a path names; None for a member of instances alone. `a|b`: one of both, by the version of torch."""
    owner_path, _, names = path.rpartition(".")
    owner = resolve(owner_path)
    for name in names.split("|"):
        if hasattr(owner, name):
            return getattr(owner, name)
        try:
            return importlib.import_module(f"{owner_path}.{name}")
        except ImportError:
            pass
        if isinstance(owner, type) and is_set_by(owner, name):
            return None
    raise AttributeError(f"{owner_path} has no {names}")


def resolve(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return find(path)


def is_set_by(owner: type, name: str) -> bool:
    """Whether instances get the attribute: it is annotated, or assigned in a method."""
    for kind in owner.__mro__:
        if name in getattr(kind, "__annotations__", {}):
            return True
        try:
            if re.search(rf"self\.{name}\b.*=", inspect.getsource(kind)):
                return True
        except (OSError, TypeError):  # a class of C++
            continue
    return False


def parameters(found: Any) -> list[inspect.Parameter] | None:
    """None for what is no function, or one of C++. Operators have a schema."""
    if isinstance(found, torch._ops.OpOverloadPacket):
        schema = getattr(found, found.overloads()[0])._schema
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [
            inspect.Parameter(
                one.name,
                kinds[not one.kwarg_only],
                default=one.default_value if one.has_default_value() else inspect.Parameter.empty,
            )
            for one in schema.arguments
        ]
    if isinstance(found, types.MethodDescriptorType):
        return None  # one of C++; Python 3.13 knows of its `self`
    try:
        return list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return None


def frozen() -> dict[str, list[str]]:
    lines = FROZEN.read_text().splitlines()
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


ALL = sorted({path for layer in LAYERS for path in listed_in(layer)})


@pytest.mark.parametrize("path", ALL)
def test_torch_has_it_as_we_call_it(path: str) -> None:
    found = parameters(find(path))
    expected = frozen()[path]
    if found is not None and "|" not in path and expected != ["-"]:
        assert [one.name for one in found][: len(expected)] == expected
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        later = [one for one in found[len(expected) :] if one.kind not in variadic]
        assert [one.name for one in later if one.default is inspect.Parameter.empty] == []


def test_the_frozen_signatures_are_those_of_the_listed_names() -> None:
    assert sorted(frozen()) == ALL, "run `python -m tests.test_torch_internals`"


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and word != "_"


def own_names() -> set[str]:
    """Private names that this tree defines itself: functions, classes, fields, attributes."""
    found = set()
    for path in source_files():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def torch_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Names in a module that stand for torch, or for something imported from it."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname or "torch" for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def uses(path: Path, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Private names of torch that a module imports or reads, with the line."""
    nodes = nodes_of(path)
    torchs = torch_names(nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                if any(map(is_private, [*str(node.module).split("."), alias.name])):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
            if owner.split(".")[0] in torchs or (owner not in NO_TORCH and node.attr not in ours):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)) and name not in ours:
                yield node.lineno, str(name)
        elif isinstance(node, ast.Constant) and PRIVATE_PATH.fullmatch(str(node.value)):
            yield node.lineno, str(node.value)


@pytest.mark.slow
def test_no_module_names_a_private_part_of_torch_that_its_layer_does_not_list() -> None:
    ours, unlisted = own_names(), []
    for path in source_files():
        layer = path.relative_to(PACKAGE).parts[0]
        if path.name == "torch_internals.py":
            continue
        members = list(members_of(layer)) if layer in LAYERS else []
        allowed = {name for member in members for name in member.rpartition(".")[2].split("|")} | set(OF_OTHERS)
        for line, name in uses(path, ours):
            is_listed = name in allowed or any(f"{member}.".startswith(f"{name}.") for member in members)
            if not is_listed:
                unlisted.append(f"{path.relative_to(PACKAGE)}:{line} {name}")
    assert unlisted == [], "take it from the layer's torch_internals, or list it there"


if __name__ == "__main__":
    written = {path: [] if "|" in path else parameters(find(path)) or [] for path in ALL}
    FROZEN.write_text(
        "".join(f"{path}: {' '.join(one.name for one in found)}".rstrip() + "\n" for path, found in written.items())
    )
