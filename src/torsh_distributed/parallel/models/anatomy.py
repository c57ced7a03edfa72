"""What a model consists of: its blocks, attention, experts, embeddings and head; what it declares about splitting.

Three sources, in this order: what the model says itself (models of transformers carry plans in their configuration),
what its author writes (`torsh_anatomy`), and the structure of its modules. Nothing here imports transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.models import structure
from torsh_distributed.parallel.models.structural_plan import structural_plan
from torsh_distributed.parallel.models.wrapping import block_lists
from torsh_distributed.plan.problems import did_you_mean

Flows = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Module name to the names of what goes in and of what comes out."""

DECLARED_BY_TRANSFORMERS = "declared by transformers"
DECLARED_BY_USER = "declared by the user"
FOUND = "found in the structure"

PROTOCOL = "torsh_anatomy"
"""The method, or attribute, with which a model describes itself: a mapping with any of the fields of ModelAnatomy."""


@dataclass(frozen=True, kw_only=True)
class ModelAnatomy:
    """The parts of a model, by the names of its modules."""

    base: str
    """The submodule that owns the layers, such as `model` or `transformer`; empty if the model itself does."""
    layers: tuple[str, ...]
    """The blocks that repeat, in the order in which they run."""
    layer_lists: tuple[str, ...]
    """The containers of the blocks. Several: an encoder and a decoder, or stages that follow each other."""
    is_encoder_decoder: bool = False
    """Whether a decoder attends to the result of an encoder, so the blocks are not one chain."""
    embeddings: tuple[str, ...] = ()
    """What turns the input into activations; outside the blocks."""
    norms: tuple[str, ...] = ()
    """Norms outside the blocks, after them."""
    head: str | None = None
    """The linear layer that gives logits; None for a model without."""
    rotary: tuple[str, ...] = ()
    """Modules outside the blocks that compute tables of positions; they have no parameters."""
    attention: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    """Modules whose parameters have an entry for each expert."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names that are one tensor."""
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    """Pattern of module or parameter names, with * for a layer's number, to the style in which it is split."""
    expert_plan: Mapping[str, str] = field(default_factory=dict)
    """The same for experts spread over ranks."""
    flows: Flows = field(default_factory=dict)
    """What goes between modules, where the model declares it (transformers' pipeline plan)."""
    source: str = FOUND


def anatomy_of(model: nn.Module) -> ModelAnatomy:
    """The parts of any model. Changes nothing and needs no process group; also for models on the meta device.

    Raises InvalidArgument, with what to write, if no blocks can be found or a declaration names modules that are not
    there.
    """
    found = _from_structure(model)
    if is_from_transformers(model):
        found.update(_from_transformers(model, found))
    written = _written(model)
    if written is not None:
        found.update(written, source=DECLARED_BY_USER)
    if not found["layers"]:
        raise InvalidArgument(
            f"{type(model).__name__} has no blocks that repeat, so its parts are not known",
            hint=f"put its layers into an nn.ModuleList or nn.Sequential, or give it a method {PROTOCOL}() that returns"
            ' {"layers": [names of its blocks]}',
            modules=[name for name, _ in model.named_children()],
        )
    return ModelAnatomy(**found)


def is_from_transformers(model: nn.Module) -> bool:
    """Whether a model follows transformers' conventions: a configuration, and classes that stay whole."""
    return hasattr(model, "config") and hasattr(model, "_no_split_modules") and hasattr(model, "base_model_prefix")


def _from_structure(model: nn.Module) -> dict[str, Any]:
    lists = block_lists(model)
    layers = tuple(name for blocks in lists.values() for name in blocks)
    outside = {name: module for name, module in model.named_modules() if name and not _is_below(name, layers)}
    return {
        "base": _common_parent(lists),
        "layers": layers,
        "layer_lists": tuple(lists),
        "is_encoder_decoder": _is_encoder_decoder(model),
        "embeddings": _embeddings(model, outside, lists),
        "norms": _norms(outside, lists),
        "head": _head(outside, lists),
        "rotary": tuple(name for name, module in outside.items() if _computes_positions(module)),
        "attention": tuple(structure.attention_modules(model)),
        "mlp": tuple(dict.fromkeys(pair.where for pair in structure.feed_forwards(model))),
        "experts": tuple(structure.expert_modules(model)),
        "tied": tied_params(model),
        "tensor_plan": {},
        "expert_plan": {},
        "flows": {},
        "source": FOUND,
    }


def _from_transformers(model: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a model of transformers says about itself; the rest stays as found."""
    names = {id(module): name for name, module in model.named_modules()}
    said: dict[str, Any] = {}
    prefix = model.base_model_prefix
    if any(name == prefix or name.startswith(f"{prefix}.") for name in found["layer_lists"]) and prefix:
        said["base"] = prefix
    head = _asked(model, "get_output_embeddings")
    if isinstance(head, nn.Linear) and id(head) in names:
        said["head"] = names[id(head)]
    within = _place_of_inner(model, names)
    tensor_plan = {f"{within}{name}": style for name, style in (getattr(model, "tp_plan", None) or {}).items()}
    flows = {
        f"{within}{name}": (tuple(into), tuple(out))
        for name, (into, out) in (getattr(model, "pp_plan", None) or {}).items()
    }
    said["flows"] = {name: flow for name, flow in flows.items() if name in names.values()}
    said["expert_plan"] = {f"{within}{name}": style for name, style in (getattr(model, "ep_plan", None) or {}).items()}
    said["is_encoder_decoder"] = bool(getattr(model.config, "is_encoder_decoder", False))
    if _names_blocks(tensor_plan) or said["flows"]:
        said["source"] = DECLARED_BY_TRANSFORMERS
    said["tensor_plan"] = tensor_plan if _names_blocks(tensor_plan) else structural_plan(model)
    return said


def _place_of_inner(model: Any, names: Mapping[int, str]) -> str:
    """What precedes the names of a model inside another that speaks for it, as PEFT's does; empty for others."""
    inner = _asked(model, "get_base_model")
    name = names.get(id(inner), "")
    return f"{name}." if name else ""


def _names_blocks(plan: Mapping[str, str]) -> bool:
    """Whether a tensor plan says something about blocks, not only about the head."""
    return any("*" in pattern for pattern in plan)


def _asked(model: Any, method: str) -> Any:
    """The answer of a method that models may lack or not implement."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _written(model: nn.Module) -> dict[str, Any] | None:
    """What the author of the model writes in `torsh_anatomy`, checked against the model."""
    given = getattr(model, PROTOCOL, None)
    if given is None:
        return None
    said: Any = given() if callable(given) else given
    if isinstance(said, ModelAnatomy):
        return {one.name: getattr(said, one.name) for one in fields(ModelAnatomy) if one.name != "source"}
    known = [one.name for one in fields(ModelAnatomy) if one.name != "source"]
    modules = [name for name, _ in model.named_modules()]
    out: dict[str, Any] = {}
    for key, value in dict(said).items():
        if key not in known:
            raise InvalidArgument(
                f"{type(model).__name__}.{PROTOCOL}: there is no part {key!r}",
                hint=did_you_mean(key, known) or f"one of {', '.join(known)}",
            )
        if key in ("layers", "layer_lists", "embeddings", "norms", "rotary", "attention", "mlp", "experts"):
            value = tuple(value)  # noqa: PLW2901 (the same, immutable)
            _require_modules(model, key, value, modules)
        elif key in ("base", "head") and value is not None:
            _require_modules(model, key, (value,), modules)
        out[key] = value
    if "layers" in out and "layer_lists" not in out:
        out["layer_lists"] = tuple(dict.fromkeys(name.rpartition(".")[0] for name in out["layers"]))
    return out


def _require_modules(model: nn.Module, key: str, names: Iterable[str], modules: list[str]) -> None:
    for name in names:
        if name not in modules:
            raise InvalidArgument(
                f"{type(model).__name__}.{PROTOCOL}: {key} names {name!r}, and the model has no such module",
                hint=did_you_mean(name, modules) or f"the model has: {', '.join(modules[1:9])}",
            )


def _is_below(name: str, tops: Iterable[str]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def _common_parent(lists: Iterable[str]) -> str:
    """The innermost module around all containers of blocks."""
    parents = [name.split(".")[:-1] for name in lists]
    shared: list[str] = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _is_encoder_decoder(model: nn.Module) -> bool:
    """Whether blocks of a torch Transformer decode: nn.Transformer, or a decoder beside an encoder."""
    return any(isinstance(module, nn.TransformerDecoderLayer) for module in model.modules())


def _embeddings(
    model: nn.Module, outside: Mapping[str, nn.Module], lists: Mapping[str, Mapping[str, nn.Module]]
) -> tuple[str, ...]:
    """Tables outside the blocks; without any, what has parameters and stands before the first block."""
    tables = tuple(name for name, module in outside.items() if isinstance(module, nn.Embedding))
    if tables or not lists:
        return tables
    first = next(iter(lists))
    before: list[str] = []
    for name, module in outside.items():
        if _is_below(name, lists) or name == first:
            break
        is_around = any(one.startswith(f"{name}.") for one in lists)
        if next(module.parameters(recurse=False), None) is not None and not is_around:
            before.append(name)
    return tuple(before)


def _norms(outside: Mapping[str, nn.Module], lists: Mapping[str, Any]) -> tuple[str, ...]:
    """Norms beside the containers of blocks, or beside a module around one: those after it, else those before it."""
    around = {parent for name in lists for parent in _parents(name)}
    norms = [name for name, module in outside.items() if structure.is_norm(module) and _parent(name) in around]
    order = list(outside)
    ends = [order.index(name) for name in lists if name in outside]
    after = [name for name in norms if ends and order.index(name) > max(ends)]
    return tuple(after or [name for name in norms if _parent(name) in {_parent(one) for one in lists}])


def _head(outside: Mapping[str, nn.Module], lists: Mapping[str, Any]) -> str | None:
    """The last linear layer after the blocks; one beside or above the module that owns them."""
    around = {parent for name in lists for parent in _parents(name)}
    order = list(outside)
    ends = [order.index(name) for name in lists if name in outside] or [-1]
    linear = [name for name, module in outside.items() if isinstance(module, nn.Linear)]
    named = [name for name in linear if structure.is_head(name, outside[name])]
    near = [name for name in linear if {_parent(name), _parent(_parent(name))} & around]
    after = [name for name in near if order.index(name) > max(ends)]
    return next(iter(named or reversed(after)), None)


def _computes_positions(module: nn.Module) -> bool:
    """Whether a module without parameters makes tables from positions: rotary embeddings."""
    if next(module.parameters(), None) is not None or next(module.children(), None) is not None:
        return False
    if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
        return True
    return "position_ids" in inspect.signature(module.forward).parameters


def tied_params(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _parents(name: str) -> list[str]:
    """The modules around one, innermost first; the last is the model."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
