"""Finds the blocks that repeat in a model: by the classes the model names itself, else by containers of one class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# They have no forward, so nothing signals when their parameters are needed.
WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

BlockLists = dict[str, dict[str, nn.Module]]
"""Name of a container to its blocks by name, both in the order of the model."""


def block_lists(model: nn.Module) -> BlockLists:
    """The outermost containers whose modules repeat, with those modules.

    A model of transformers names the classes of its blocks (`_no_split_modules`): every member of a container that
    holds one of them is a block, also if it is the only one. Elsewhere a block is one of two or more modules of a class
    in a container; a Sequential that itself holds repeated modules with parts is looked into.
    """
    named = getattr(model, "_no_split_modules", None)
    return _by_class(model, frozenset(named)) if named and _by_class(model, frozenset(named)) else _by_repetition(model)


def has_params(module: nn.Module) -> bool:
    """Whether a module or one below it has parameters."""
    return next(module.parameters(), None) is not None


def _by_class(model: nn.Module, classes: Collection[str]) -> BlockLists:
    found: BlockLists = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or _is_inside(path, found):
            continue
        if any(type(child).__name__ in classes for child in module):
            found[path] = {_join(path, name): child for name, child in module.named_children() if has_params(child)}
    return {path: blocks for path, blocks in found.items() if blocks}


def _by_repetition(model: nn.Module) -> BlockLists:
    found: BlockLists = {}
    for path, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or _is_inside(path, found):
            continue
        blocks = {_join(path, name): child for name, child in _repeated(module).items()}
        if blocks:
            found[path] = blocks
    return found


def _repeated(container: nn.Module) -> dict[str, nn.Module]:
    """The members that have parameters, are no stages themselves, and share their class with another one."""
    members = container.named_children()
    children = {name: child for name, child in members if has_params(child) and not _holds_blocks(child)}
    counts = Counter(type(child) for child in children.values())
    return {
        name: child
        for name, child in children.items()
        if counts[type(child)] > 1 and not isinstance(child, WITHOUT_FORWARD)
    }


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a Sequential is a stage of blocks, not a block: what repeats in it has parts of its own."""
    if not isinstance(module, nn.Sequential):
        return False
    return any(next(child.children(), None) is not None for child in _repeated(module).values())


def _is_inside(path: str, found: BlockLists) -> bool:
    blocks = [name for members in found.values() for name in members]
    return any(path == block or path.startswith(f"{block}.") for block in blocks)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
