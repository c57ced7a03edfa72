"""Groups the modules of a model: pieces that are gathered as one, layers that are recomputed as one."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection

from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.blocks import WITHOUT_FORWARD, block_lists, has_params
from torsh_distributed.plan.problems import did_you_mean
from torsh_distributed.plan.sections.data import FsdpConfig

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
