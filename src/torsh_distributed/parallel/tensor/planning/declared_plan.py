"""The rows of a tensor plan from patterns of names: what a model of transformers declares, or its author writes.

Layers under an adapter (PEFT's LoRA): the layer is split as planned, and its two small ones so the sum still fits.
An adapter computes `base_layer(x) + lora_B(lora_A(x))`. Under a layer split by output features `lora_A` is whole and
`lora_B` is split alike; under one split by input features `lora_A` is split alike, its result summed, and `lora_B` is
whole. Gradients are then right as they are: each of these layers completes what it takes or returns.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models import structure
from torsh_distributed.parallel.models.anatomy import ModelAnatomy
from torsh_distributed.parallel.models.structural_plan import generic_name
from torsh_distributed.parallel.tensor.attention import check_heads
from torsh_distributed.parallel.tensor.planning.planned_rows import (
    AttributeChange,
    PlannedModule,
    SplitStyle,
    planned,
    planned_param,
    style_named,
)
from torsh_distributed.plan.sections.mesh import TensorConfig

BASE = "base_layer"
_PART = re.compile(rf"(?P<layer>.+)\.(?:(?P<base>{BASE})|(?P<lora>lora_[AB])\.[^.]+)")
_COLUMNS = (
    SplitStyle.COLUMN_LOCAL,
    SplitStyle.COLUMN_GATHERED,
    SplitStyle.COLUMN_PACKED,
    SplitStyle.KEY_VALUE,
)
_ROWS = (SplitStyle.ROW, SplitStyle.ROW_PACKED)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module stands in the place of a layer that it holds, and adds to its result."""
    return isinstance(getattr(module, BASE, None), nn.Module)


def adapted_layer(name: str) -> str | None:
    """The layer that a module belongs to, as its base or a part of its adapter; None for other names."""
    found = _PART.fullmatch(name)
    return None if found is None else found["layer"]


def part_style(name: str, style: SplitStyle | None) -> SplitStyle | None:
    """The style of a part of an adapted layer whose own style is `style`; None where it stays whole."""
    found = _PART.fullmatch(name)
    if found is None or style is None:
        return None
    if found["base"]:
        return style
    return style if style in {"lora_A": _ROWS, "lora_B": _COLUMNS}[found["lora"]] else None


def split_parts(name: str, module: nn.Module) -> list[str]:
    """What is split in place of a layer that is split by output features: the layer, or its base and `lora_B`."""
    if not is_adapted(module):
        return [name]
    ups: Any = getattr(module, "lora_B", {})
    return [f"{name}.{BASE}", *(f"{name}.lora_B.{adapter}" for adapter in ups)]


def check_adapter(name: str, module: nn.Module, style: SplitStyle, config: TensorConfig) -> None:
    """Refuse adapters of which not every part is known, on a layer that is split; ConfigurationError says which."""
    kind = type(module).__name__
    hint = f"leave the layer whole: tensor.overrides {name}=replicated"
    others = [one for one, _ in module.named_parameters() if not one.startswith((f"{BASE}.", "lora_A.", "lora_B."))]
    if others or style not in (*_COLUMNS, *_ROWS):
        what = f"has {others[0]}" if others else f"is to be split as {style.value!r}"
        raise ConfigurationError(
            f"{name}: the adapter ({kind}) {what}, and mesh.tp knows LoRA of linear layers only", hint=hint
        )
    dropped = [one.p for one in module.modules() if isinstance(one, nn.Dropout) and one.p > 0]
    if dropped:
        raise ConfigurationError(
            f"{name}: the adapter has dropout {dropped[0]:g}, and ranks along mesh.tp would drop different elements of"
            " the same input",
            hint="set lora_dropout = 0",
        )
    if config.sequence_parallel:
        raise ConfigurationError(
            f"{name}: tensor.sequence_parallel does not support adapters, which take whole sequences",
            hint="set tensor.sequence_parallel = false",
        )


_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "attn_head_size")


@dataclass(frozen=True)
class DeclaredRows:
    """What is split and how, and the numbers that modules with fewer heads must know."""

    rows: tuple[PlannedModule, ...]
    attributes: tuple[AttributeChange, ...]


def declared_rows(
    model: nn.Module,
    anatomy: ModelAnatomy,
    *,
    tp: int,
    config: TensorConfig,
    overrides: Mapping[str, SplitStyle],
    left_alone: Collection[str] = (),
) -> DeclaredRows:
    """The rows for every module with parameters, in the order of the model.

    `overrides` maps names to styles and wins; `left_alone` are modules that another axis splits, with all below them.
    """
    names = _Patterns(anatomy.tensor_plan, overrides, left_alone)
    heads = [one for where in anatomy.attention if (one := _heads(model, where, names)) is not None]
    rows: dict[str, PlannedModule] = {}
    attributes: list[AttributeChange] = []
    for found in heads:
        check_heads(found.num_heads, None, tp, where=found.where)
        attributes += found.changes(model.get_submodule(found.where), tp)
        if found.num_key_value_heads % tp:
            detail = (found.num_heads, found.num_key_value_heads)
            for layer in found.key_value:
                for name in split_parts(layer, model.get_submodule(layer)):
                    part = model.get_submodule(name)
                    row = planned(name, part, SplitStyle.KEY_VALUE, note="heads fewer than ranks share")
                    rows[name] = dataclasses.replace(row, detail=detail)
    for row in _rows(model, anatomy, names, config):
        rows.setdefault(row.name, row)
    order = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    whole = with_tied_whole(anatomy.tied, rows)
    return DeclaredRows(tuple(whole[name] for name in order if name in whole), tuple(attributes))


@dataclass(frozen=True)
class _Patterns:
    """Looks up the style of a name."""

    declared: Mapping[str, str]
    overrides: Mapping[str, SplitStyle]
    left_alone: Collection[str]

    def style(self, name: str) -> SplitStyle | None:
        """The style of a module or parameter; None if the plan does not name it."""
        if name in self.overrides:
            return self.overrides[name]
        if any(name == top or name.startswith(f"{top}.") for top in self.left_alone):
            return None
        said = self.declared.get(name) or self.declared.get(generic_name(name))
        if said is None:
            said = next((style for pattern, style in self.declared.items() if fnmatchcase(name, pattern)), None)
        if said is None:
            layer = adapted_layer(name)
            return None if layer is None else part_style(name, self.style(layer))
        return style_named(said, where=f"the tensor plan of {name}")


def _rows(model: nn.Module, anatomy: ModelAnatomy, names: _Patterns, config: TensorConfig) -> Iterator[PlannedModule]:
    for name, module in model.named_modules():
        style = names.style(name) if name else None
        note = "override" if name in names.overrides else ""
        if style is not None and is_adapted(module):
            if style is not SplitStyle.REPLICATED:
                check_adapter(name, module, style, config)
            continue  # its base and its parts have rows of their own
        is_head = name == anatomy.head
        if style is SplitStyle.COLUMN_GATHERED and is_head and config.loss_parallel:
            style = SplitStyle.COLUMN
        split = {one for one, _ in module.named_parameters(recurse=False) if names.style(f"{name}.{one}") is not None}
        if style is SplitStyle.EXPERTS:
            _check_experts(name, module, split)
        if style is not None and not (style is SplitStyle.EXPERTS and not split):
            row = planned(name, module, style, note=note)
            row = dataclasses.replace(row, is_head=is_head, detail=_detail(name, module, style, model))
            yield row
        elif next(module.parameters(recurse=False), None) is not None and not split:
            yield planned(name, module, _unnamed_style(name, module, anatomy, config), note=note)
        for one in split:
            param = module._parameters[one]
            style = names.style(f"{name}.{one}")
            assert param is not None, "named_parameters has it"
            assert style is not None, "looked up above"
            yield planned_param(f"{name}.{one}" if name else one, param, style)


def _unnamed_style(name: str, module: nn.Module, anatomy: ModelAnatomy, config: TensorConfig) -> SplitStyle:
    """How a module is held that the plan does not name; whole, unless its output is a part of the sequence."""
    if not config.sequence_parallel or any(name.startswith(f"{one}.") for one in anatomy.attention):
        return SplitStyle.REPLICATED
    if structure.is_norm(module) or structure.is_position_table(name, module):
        return SplitStyle.SEQUENCE
    # Some plans of transformers 5.17 leave the table of tokens out. Whole, nobody would add up its gradients.
    return SplitStyle.VOCABULARY if isinstance(module, nn.Embedding) else SplitStyle.REPLICATED


def _detail(name: str, module: nn.Module, style: SplitStyle, model: nn.Module) -> tuple[int, ...]:
    """What the style has to know beyond the module: for latent attention, how many outputs go to all heads."""
    if style is not SplitStyle.LATENT:
        return ()
    parent = model.get_submodule(name.rpartition(".")[0])
    for owner in (parent, getattr(parent, "config", None), getattr(model, "config", None)):
        tail = getattr(owner, "qk_rope_head_dim", None)
        if isinstance(tail, int):
            return (tail,)
    raise ConfigurationError(
        f"{name}: the number of outputs with positions (qk_rope_head_dim) is not known",
        hint=f"override it with 'replicated' together with the layers of {name.rpartition('.')[0]}",
        key="tensor.overrides",
    )


def _check_experts(name: str, module: nn.Module, split: set[str]) -> None:
    """Refuse experts of which every rank would add something whole that is not a bias."""
    others = [one for one, _ in module.named_parameters(recurse=False) if one not in split and "bias" not in one]
    if split and others:
        raise ConfigurationError(
            f"{name}: {others[0]} is whole, and the experts around it are split by features",
            hint=f"name {name}.{others[0]} in the tensor plan, or override {name} with 'replicated'",
            key="tensor.overrides",
        )


@dataclass(frozen=True)
class _Heads:
    where: str
    num_heads: int
    num_key_value_heads: int
    key_value: tuple[str, ...]

    def changes(self, module: nn.Module, tp: int) -> Iterator[AttributeChange]:
        """Numbers of heads that the module keeps, for its part of them."""
        is_even = self.num_key_value_heads % tp == 0
        here = self.num_heads // tp
        shared = self.num_key_value_heads // tp if is_even else here
        known = vars(module)
        for names, whole, part in (
            (structure.HEAD_COUNTS, self.num_heads, here),
            (structure.KEY_VALUE_COUNTS, self.num_key_value_heads, shared),
        ):
            for name in names:
                if known.get(name) == whole:
                    yield AttributeChange(self.where, name, part)
        if not is_even and "num_key_value_groups" in known:
            yield AttributeChange(self.where, "num_key_value_groups", 1)


def _heads(model: nn.Module, where: str, names: _Patterns) -> _Heads | None:
    """The heads of an attention module whose queries stay split; None for another one."""
    module = model.get_submodule(where)
    local = (SplitStyle.COLUMN_LOCAL, SplitStyle.COLUMN_PACKED)
    linears = {
        name.lower(): f"{where}.{name}" if where else name
        for name, child in module.named_children()
        if structure.widths(child) is not None
    }
    split = {short: name for short, name in linears.items() if names.style(name) in local}
    if not split:
        return None
    num_heads = structure.head_count(module)
    keys = [name for short, name in split.items() if short in structure.KEY_VALUE]
    queries = [
        name for short, name in split.items() if short in structure.QUERY | structure.FUSED_QKV | structure.LATENT
    ]
    if num_heads is None or not queries:
        return None
    num_shared = num_heads
    if keys:
        head_dim = next((one for name in _HEAD_WIDTHS if isinstance(one := getattr(module, name, None), int)), None)
        width = structure.widths(model.get_submodule(keys[0]))
        assert width is not None, "found by it"
        counted = structure.key_value_head_count(module)
        num_shared = width[1] // head_dim if head_dim else counted or num_heads
    return _Heads(where, num_heads, num_shared, tuple(keys))


def with_tied_whole(tied: Iterable[tuple[str, ...]], rows: Mapping[str, PlannedModule]) -> dict[str, PlannedModule]:
    """The rows, with modules left whole that share a parameter with a whole one."""
    out = dict(rows)
    for group in tied:
        owners = [name.rpartition(".")[0] for name in group if name.rpartition(".")[2] == "weight"]
        styles = {name: out[name] for name in owners if name in out}
        if any(row.cut is None for row in styles.values()) and any(row.cut for row in styles.values()):
            keeper = next(name for name, row in styles.items() if row.cut is None)
            for name, row in styles.items():
                note = row.note if name == keeper else f"tied to {keeper}, which is whole"
                out[name] = dataclasses.replace(row, style=SplitStyle.REPLICATED, cut=None, note=note)
    return out
