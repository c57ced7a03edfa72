"""Groups the modules of a model: pieces that are gathered as one, layers that are recomputed as one."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Collection

from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.problems import did_you_mean
from torsh_distributed.plan.sections.data import FsdpConfig

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
    """The members that have parameters, are not stages themselves, and share their class with another one."""
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


Named = dict[str, nn.Module]
"""Modules by name, in the order of the model."""

WrapFn = Callable[[str, nn.Module], bool]
"""Whether the module of this name is one piece; must answer the same on every rank."""

_SHOWN = 8


def pieces_of(model: nn.Module, config: FsdpConfig, wrap_fn: WrapFn | None = None) -> Named:
    """The modules whose parameters are gathered as one piece, as the config says; the rest belongs to the model itself.

    `wrap_fn(name, module)` decides for each module instead of the config. A piece may contain smaller ones. A module
    that shares a parameter with a module outside it is not a piece, because a parameter belongs to one piece only: it
    is left to the piece around both, or to the model.
    """
    ignored = ignored_modules(model, config.ignored_modules)
    if wrap_fn is not None:
        chosen = {name: module for name, module in model.named_modules() if wrap_fn(name, module)}
    elif config.wrap_classes or config.wrap_names:
        chosen = matching(model, classes=config.wrap_classes, names=config.wrap_names, section="fsdp.wrap")
    elif config.wrap == "none":
        chosen = {}
    elif config.wrap == "size":
        chosen = _by_size(model, config.wrap_min_params, except_for=ignored)
    else:
        chosen = repeated_layers(model) or _by_size(model, config.wrap_min_params, except_for=ignored)
    return {
        name: module
        for name, module in chosen.items()
        if name
        and name not in ignored
        and not isinstance(module, WITHOUT_FORWARD)
        and has_params(module)
        and not _shares_outside(model, module)
    }


def ignored_modules(model: nn.Module, patterns: Collection[str]) -> Named:
    """The modules that match a pattern, with all below them."""
    found = matching(model, names=patterns, section="fsdp.ignored_modules")
    return {
        name: module
        for name, module in model.named_modules()
        if any(name == top or name.startswith(f"{top}.") for top in found)
    }


def repeated_layers(model: nn.Module) -> Named:
    """The layers a deep model consists of: those it names itself, else modules of one class, two or more in one list.

    Outermost lists only.
    """
    return {name: block for blocks in block_lists(model).values() for name, block in blocks.items()}


def matching(model: nn.Module, *, classes: Collection[str] = (), names: Collection[str] = (), section: str) -> Named:
    """The modules of these classes or whose names match a pattern; each class and pattern must match something.

    A pattern is matched part by part: `layers.*` is every layer, not what is inside them.
    """
    modules = dict(model.named_modules())
    known = {type(module).__name__ for module in modules.values()}
    for wanted in classes:
        if wanted not in known:
            raise _nothing(f"{section}_classes: no module is a {wanted}", wanted, sorted(known))
    for pattern in names:
        if not any(_matches(name, pattern) for name in modules):
            key = section if section.endswith("modules") else f"{section}_names"
            raise _nothing(f"{key}: no module's name matches {pattern!r}", pattern, [name for name in modules if name])
    return {
        name: module
        for name, module in modules.items()
        if type(module).__name__ in classes or any(_matches(name, pattern) for pattern in names)
    }


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _nothing(message: str, wanted: str, candidates: list[str]) -> ConfigurationError:
    near = did_you_mean(wanted, candidates)
    shown = ", ".join(candidates[:_SHOWN]) + (
        f" and {len(candidates) - _SHOWN} more" if len(candidates) > _SHOWN else ""
    )
    return ConfigurationError(message, hint=near or f"the model has: {shown}", candidates=candidates[:_SHOWN])


def _by_size(model: nn.Module, min_params: int, *, except_for: Named) -> Named:
    """Bottom-up: a module is a piece if it has at least `min_params` parameters outside its own pieces."""
    taken: set[int] = set()
    found: Named = {}
    for name, module in reversed(list(model.named_modules())):
        if name in except_for or isinstance(module, WITHOUT_FORWARD):
            continue
        rest = {id(param): param.numel() for param in module.parameters() if id(param) not in taken}
        if name and rest and sum(rest.values()) >= min_params:
            found[name] = module
            taken |= rest.keys()
    return dict(reversed(found.items()))


def _shares_outside(model: nn.Module, module: nn.Module) -> bool:
    """Whether a module outside `module` shares one of its parameters."""
    inside = set(map(id, module.modules()))
    mine = set(map(id, module.parameters()))
    outside = (other for other in model.modules() if id(other) not in inside)
    return any(id(param) in mine for other in outside for param in other.parameters(recurse=False))
