"""A tensor plan, in transformers' words, for a model of transformers that declares none: from the shapes of its layers.

Only what is certain stays split between two layers; where heads or features might mix in between, the output of the
first layer is gathered and the input of the second one taken apart again, which is right for any code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from torsh_distributed.parallel.models import structure
from torsh_distributed.parallel.models.wrapping import block_lists

_INNER_WIDTHS = ("embed_dim", "hidden_size", "d_model", "dim", "hidden_dim", "inner_dim", "all_head_size", "split_size")
"""Attributes in which attention modules keep the width of all heads; code that uses one expects all heads."""


def structural_plan(model: nn.Module) -> dict[str, str]:
    """Pattern of module names, with * for numbers where all agree, to style; empty if nothing is known to split."""
    styles: dict[str, str] = {}
    for blocks in block_lists(model).values():
        for name, block in blocks.items():
            styles.update(_block_styles(model, name, block))
    if styles:
        styles.update(_table_styles(model))
    return _with_wildcards(styles)


def generic_name(name: str) -> str:
    """The name with * in place of every number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", re.sub(r"^\d+(?=\.|$)", "*", name))


@dataclass(frozen=True)
class _Projections:
    """The linear layers of an attention module, by full name."""

    into: tuple[str, ...]
    is_fused: bool
    out: str


def _block_styles(model: nn.Module, name: str, block: nn.Module) -> dict[str, str]:
    shapes = {f"{name}.{path}": structure.widths(child) for path, child in block.named_modules() if path}
    adapted = tuple(f"{name}.{path}." for path, child in block.named_modules() if hasattr(child, "base_layer"))
    linears = {path: shape for path, shape in shapes.items() if shape is not None and not path.startswith(adapted)}
    modules = {f"{name}.{path}" if path else name: child for path, child in block.named_modules()}
    styles: dict[str, str] = {}
    for path in structure.attention_modules(block):
        where = f"{name}.{path}" if path else name
        found = _projections(where, modules, linears)
        if found is None:
            continue
        stays_split = (
            not found.is_fused
            and _keeps_heads_apart(model, modules[where], found, modules)
            and not any(_builds_modules(type(child)) for child in modules.values())
        )
        for one in found.into:
            styles[one] = "colwise" if stays_split else "colwise_gather_output"
        styles[found.out] = "rowwise" if stays_split else "rowwise_split_input"
    rest = {one: shape for one, shape in linears.items() if one not in styles and not _is_router(one)}
    attended = tuple(f"{name}.{path}" if path else name for path in structure.attention_modules(block))
    inside = {one: shape for one, shape in rest.items() if not any(one.startswith(f"{top}.") for top in attended)}
    for ups, down, is_split in _pairs(inside, modules):
        styles.update(dict.fromkeys(ups, "colwise" if is_split else "colwise_gather_output"))
        styles[down] = "rowwise" if is_split else "rowwise_split_input"
    return styles


def _projections(
    where: str, modules: Mapping[str, nn.Module], linears: Mapping[str, tuple[int, int]]
) -> _Projections | None:
    """The layers into and out of the heads; the one out may be a neighbour, as in BERT."""
    children = {one.rpartition(".")[2].lower(): one for one in linears if one.rpartition(".")[0] == where}
    fused = next((one for short, one in children.items() if short in structure.FUSED_QKV), None)
    separate = tuple(one for short, one in children.items() if short in structure.QUERY | structure.KEY_VALUE)
    into = (fused,) if fused is not None else separate
    if fused is None and len(separate) != 3:
        return None
    inner = linears[separate[0]][1] if fused is None else None
    own = next((one for short, one in children.items() if short in structure.ATTENTION_OUT and one not in into), None)
    if own is not None:
        return _Projections(into, fused is not None, own)
    parent = where.rpartition(".")[0]
    beside = [one for one in linears if one.startswith(f"{parent}.") and not one.startswith(f"{where}.")]
    near = next((one for one in beside if inner is not None and linears[one][0] == inner), None)
    return None if near is None or fused is not None else _Projections(into, False, near)


def _keeps_heads_apart(
    model: nn.Module, attention: nn.Module, found: _Projections, modules: Mapping[str, nn.Module]
) -> bool:
    """Whether each head is computed by itself, for any number of heads: the module has no further parameters in any
    place, knows its number of heads, and its code does not use the width of all of them."""
    if structure.head_count(attention) is None:
        return False
    layers = {id(modules[one]) for one in (*found.into, found.out)}
    for other in model.modules():
        if type(other) is type(attention):
            linear = {id(one) for one in other.children() if structure.widths(one) is not None}
            owned = {id(one) for one in other.modules() if next(one.parameters(recurse=False), None) is not None}
            if owned - linear - layers:
                return False
    inner = structure.widths(modules[found.into[0]])
    used = set(_names_used(type(attention)))
    return (
        not any(getattr(attention, one, None) == (inner or (0, 0))[1] and one in used for one in _INNER_WIDTHS)
        and "weight" not in used
    )


def _builds_modules(kind: type[nn.Module]) -> bool:
    """Whether methods of a class make modules after it is built, as BigBird's attention does: those have all heads."""
    for name, method in vars(kind).items():
        code, known = getattr(method, "__code__", None), getattr(method, "__globals__", {})
        if code is None or name == "__init__":
            continue
        made = (known.get(one) for one in code.co_names)
        if any(isinstance(one, type) and issubclass(one, nn.Module) for one in made):
            return True
    return False


def _names_used(kind: type[nn.Module]) -> Iterator[str]:
    """The names that the methods of a class use, except where it is built."""
    for name, method in vars(kind).items():
        code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
        if code is not None and name != "__init__":
            yield from code.co_names


def _pairs(
    linears: Mapping[str, tuple[int, int]], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Layers that widen, the one that narrows again, and whether what is between them works on each feature alone."""
    names = list(linears)
    used: set[str] = set()
    for place, down in enumerate(names):
        wide, narrow = linears[down]
        before = [one for one in names[:place] if one not in used and linears[one][0] == narrow]
        ups = tuple(one for one in before if linears[one][1] == wide and wide != narrow)
        fused = tuple(one for one in before if linears[one][1] == 2 * wide)
        if ups or fused:
            used |= {*ups, *fused, down}
            yield ups or fused[-1:], down, bool(ups) and not _mixes(ups, down, wide, modules)


def _mixes(ups: tuple[str, ...], down: str, width: int, modules: Mapping[str, nn.Module]) -> bool:
    """Whether another module with parameters of this width may stand between the layers, such as a norm."""
    top = _common_prefix((*ups, down))
    return any(
        param.dim() == 1 and param.shape[0] == width
        for name, module in modules.items()
        if name.startswith(top) and name not in (*ups, down)
        for param in module.parameters(recurse=False)
    )


def _common_prefix(names: tuple[str, ...]) -> str:
    shared: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _is_router(name: str) -> bool:
    return name.rpartition(".")[2].lower() in ("router", "gate", "classifier")


def _table_styles(model: nn.Module) -> dict[str, str]:
    """The table of tokens, the head, and all that share the table's parameter."""
    get_table, get_head = getattr(model, "get_input_embeddings", None), getattr(model, "get_output_embeddings", None)
    try:
        table = get_table() if get_table is not None else None
    except NotImplementedError:
        table = None
    head = get_head() if get_head is not None else None
    weights = {id(one.weight) for one in (table, head) if isinstance(one, nn.Embedding | nn.Linear)}
    sharing = {name: module for name, module in model.named_modules() if id(getattr(module, "weight", None)) in weights}
    if not all(_extends(module) for module in sharing.values()):
        return {}
    return {
        name: "embedding_rowwise" if isinstance(module, nn.Embedding) else "colwise_gather_output"
        for name, module in sharing.items()
    }


def _extends(module: nn.Module) -> bool:
    """Whether a table or linear layer computes as torch's, or calls torch's forward from its own."""
    plain = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
    own = type(module).forward
    return isinstance(module, plain) and (own is plain.forward or "__class__" in own.__code__.co_freevars)


def _with_wildcards(styles: Mapping[str, str]) -> dict[str, str]:
    by_pattern: dict[str, set[str]] = {}
    for name, style in styles.items():
        by_pattern.setdefault(generic_name(name), set()).add(style)
    return {
        generic_name(name) if len(by_pattern[generic_name(name)]) == 1 else name: style
        for name, style in styles.items()
    }
