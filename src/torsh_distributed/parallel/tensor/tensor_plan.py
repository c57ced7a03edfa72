"""The plan of a tensor-parallel model: how each module is split. Pure; can be printed before it is applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from rich.table import Table
from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models import structure
from torsh_distributed.parallel.tensor.attention import check_heads
from torsh_distributed.parallel.tensor.cut import TensorCut
from torsh_distributed.plan.sections.axes.tensor import TensorConfig


class SplitStyle(StrEnum):
    """How a module is split."""

    COLUMN = "column"
    """A linear layer split by output features; what follows sees the whole shape (a DTensor)."""
    COLUMN_LOCAL = "column_local"
    """A linear layer split by output features; what follows sees this rank's piece and is element-wise."""
    COLUMN_GATHERED = "column_gathered"
    """A linear layer split by output features, its output gathered."""
    ROW = "row"
    """A linear layer split by input features, its output summed."""
    VOCABULARY = "vocabulary"
    """An embedding split by rows."""
    SEQUENCE = "sequence"
    """A norm or position table that works on this rank's piece of the sequence."""
    REPLICATED = "replicated"
    """Whole on every rank."""


@dataclass(frozen=True)
class PlannedModule:
    """One row of the plan."""

    name: str
    kind: str
    style: SplitStyle
    shape: tuple[int, ...]
    """Of its weight, whole."""
    cut: TensorCut | None
    """How its weight is cut; None where it stays whole."""
    note: str = ""


@dataclass(frozen=True)
class TensorPlan:
    """What tensor parallelism does to each module with parameters of its own."""

    tp: int
    config: TensorConfig
    modules: tuple[PlannedModule, ...]

    def style_of(self, name: str) -> SplitStyle:
        """How a module is split; REPLICATED for one that the plan does not name."""
        return next((row.style for row in self.modules if row.name == name), SplitStyle.REPLICATED)

    @property
    def num_split(self) -> int:
        """The number of modules that are split."""
        return sum(row.cut is not None for row in self.modules)

    def describe(self) -> Table:
        """A table for rich: module, style, shape of its weight before and, on the first rank, after."""
        table = Table("module", "class", "style", "weight", "on each rank", "", title=f"tensor parallel, tp {self.tp}")
        for row in self.modules:
            after = row.cut.shape(row.shape, rank=0, size=self.tp) if row.cut else row.shape
            note = row.note
            if row.cut and not note and row.shape[row.cut.dim] % self.tp:
                last = row.cut.shape(row.shape, rank=self.tp - 1, size=self.tp)
                note = f"uneven: the last rank has {_show(last)}"
            table.add_row(row.name, row.kind, row.style.value, _show(row.shape), _show(after), note)
        return table


def find_tensor_plan(
    model: nn.Module,
    *,
    tp: int,
    config: TensorConfig | None = None,
    overrides: Mapping[str, SplitStyle | str] | None = None,
) -> TensorPlan:
    """The plan for a transformer-shaped model, found by the classes, names and shapes of its layers.

    `overrides` maps patterns of module names (`blocks.*.fc1`) to styles and overrides what was found; every pattern
    must match something. Changes nothing and needs no process group. Raises ConfigurationError if heads do not divide
    or nothing can be split.
    """
    chosen = config or TensorConfig()
    wanted = _overridden(model, overrides or {})
    found = {row.name: row for row in _found(model, tp, chosen, wanted)}
    rows = tuple(
        _planned(name, module, wanted[name], note="override") if name in wanted else found[name]
        for name, module in model.named_modules()
        if name in found or name in wanted
    )
    plan = TensorPlan(tp, chosen, rows)
    if tp > 1 and not plan.num_split:
        raise ConfigurationError(
            f"mesh.tp {tp}: found no layer that tensor parallelism can split",
            hint='name the layers: overrides={"encoder.*.first": "column_local", "encoder.*.second": "row"}',
            modules=[name for name, module in model.named_modules() if isinstance(module, nn.Linear)][:6],
        )
    return plan


def _overridden(model: nn.Module, overrides: Mapping[str, SplitStyle | str]) -> dict[str, SplitStyle]:
    names = dict(model.named_modules())
    out: dict[str, SplitStyle] = {}
    for pattern, style in overrides.items():
        if style not in tuple(SplitStyle):
            raise ConfigurationError(
                f"overrides[{pattern!r}]: there is no style {style!r}", hint=f"one of {', '.join(SplitStyle)}"
            )
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigurationError(
                f"overrides[{pattern!r}] matches no module",
                hint="patterns match whole names, such as blocks.*.fc1",
                modules=[name for name in names if name][:8],
            )
        out.update({name: SplitStyle(style) for name in matched if _has_params(names[name])})
    return out


def _found(
    model: nn.Module, tp: int, config: TensorConfig, wanted: Mapping[str, SplitStyle]
) -> Iterator[PlannedModule]:
    """The rows by rule; earlier rules win, so each name occurs once."""
    seen: set[str] = set()
    for row in _candidates(model, tp, config, wanted):
        if row.name not in seen:
            seen.add(row.name)
            yield row


def _candidates(
    model: nn.Module, tp: int, config: TensorConfig, wanted: Mapping[str, SplitStyle]
) -> Iterator[PlannedModule]:
    modules = dict(model.named_modules())
    for attention in structure.attentions(model):
        layers = {attention.fused or attention.out, *attention.split, attention.out}
        if not layers <= wanted.keys():
            yield from _attention_rows(modules, attention, tp)
    for pair in structure.feed_forwards(model):
        up = SplitStyle.COLUMN_LOCAL if pair.is_elementwise else SplitStyle.COLUMN
        for name in pair.up:
            yield _planned(name, modules[name], up)
        yield _planned(pair.down, modules[pair.down], SplitStyle.ROW)
    whole = SplitStyle.SEQUENCE if config.sequence_parallel else SplitStyle.REPLICATED
    for name, module in modules.items():
        if structure.is_head(name, module):
            yield _planned(name, module, SplitStyle.COLUMN if config.loss_parallel else SplitStyle.COLUMN_GATHERED)
        elif structure.is_position_table(name, module) or structure.is_norm(module):
            yield _planned(name, module, whole)
        elif isinstance(module, nn.Embedding):
            yield _planned(name, module, SplitStyle.VOCABULARY)
        elif _has_params(module):
            yield _planned(name, module, SplitStyle.REPLICATED)


def _attention_rows(modules: Mapping[str, nn.Module], found: structure.Attention, tp: int) -> Iterator[PlannedModule]:
    if found.num_heads is None or found.num_key_value_heads is None:
        raise ConfigurationError(
            f"the number of heads of {found.where or 'the model'} is not known, so they cannot be split",
            hint=f"give the module an attribute {structure.HEAD_COUNTS[0]}, or override its layers with 'replicated'",
            looked_for=structure.HEAD_COUNTS,
        )
    heads, shared = found.num_heads, found.num_key_value_heads
    check_heads(heads, shared, tp, where=found.where or "the model")
    if found.fused is not None:
        layer = modules[found.fused]
        assert isinstance(layer, nn.Linear), "rules look at linear layers"
        width = layer.out_features * heads // (heads + 2 * shared)
        sections = (width, width * shared // heads, width * shared // heads)
        is_equal = heads == shared
        style = SplitStyle.COLUMN if is_equal else SplitStyle.COLUMN_GATHERED
        note = "query, key and value fused" + ("" if is_equal else "; attention itself runs whole")
        yield _planned(found.fused, layer, style, sections=sections, note=note)
    for name in found.split:
        yield _planned(name, modules[name], SplitStyle.COLUMN, note=f"{heads // tp} of {heads} heads on each rank")
    yield _planned(found.out, modules[found.out], SplitStyle.ROW)


_CUTS = {
    SplitStyle.COLUMN: TensorCut(0),
    SplitStyle.COLUMN_LOCAL: TensorCut(0),
    SplitStyle.COLUMN_GATHERED: TensorCut(0),
    SplitStyle.ROW: TensorCut(1),
    SplitStyle.VOCABULARY: TensorCut(0),
}


def _planned(
    name: str, module: nn.Module, style: SplitStyle, *, sections: tuple[int, ...] = (), note: str = ""
) -> PlannedModule:
    needed = {SplitStyle.VOCABULARY: nn.Embedding}.get(style, nn.Linear if style in _CUTS else nn.Module)
    if not isinstance(module, needed):
        raise ConfigurationError(
            f"{name} is a {type(module).__name__}, which cannot be split as {style.value!r}",
            hint=f"this style is for {needed.__name__}; use 'replicated' to leave the module whole",
        )
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if weight is not None else ()
    cut = _CUTS.get(style)
    if cut is not None and sections:
        cut = TensorCut(cut.dim, sections)
    return PlannedModule(name, type(module).__name__, style, shape, cut, note)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _show(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "-"
