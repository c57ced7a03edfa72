"""The plan of a tensor-parallel model: how each module is split. Pure; can be printed before it is applied.

Whether a feed-forward module computes the same in two halves: found out by running it on a few numbers.
Names and classes of layers do not show what a forward does between them. `down(gelu(up(x)))` is the sum of its halves;
`u - u.mean(-1)`, a norm or a softmax over the hidden features is not, and raises nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.models import structure
from torsh_distributed.parallel.models.anatomy import FOUND, ModelAnatomy, anatomy_of, tied_params
from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.models.structural_plan import generic_name
from torsh_distributed.parallel.models.structure import FeedForward
from torsh_distributed.parallel.tensor.attention import check_heads
from torsh_distributed.parallel.tensor.planning.declared_plan import declared_rows, with_tied_whole
from torsh_distributed.parallel.tensor.planning.planned_rows import (
    AttributeChange,
    PlannedModule,
    SplitStyle,
    planned,
    style_named,
)
from torsh_distributed.plan.problems import did_you_mean
from torsh_distributed.plan.sections.mesh import TensorConfig

_ROUNDING = 1e-2
"""Of half precision, on sums that differ by tens of percent if halves do not know of each other."""


def splits_between(model: nn.Module, pair: FeedForward) -> bool:
    """Whether the layers that widen may give each rank its own features: no other parameter needs all of them, and the
    module computes the same in halves. True where it cannot be run by itself."""
    parent = model.get_submodule(pair.where)
    start = len(pair.where) + 1 if pair.where else 0
    ups, down = [name[start:] for name in pair.up], pair.down[start:]
    layers = (*ups, down)
    others = [name for name, _ in parent.named_parameters() if name.rpartition(".")[0] not in layers]
    if others:
        return False  # used on pieces, its gradient would be that of a piece
    if any(param.is_meta for param in parent.parameters()):
        return True
    with trying(parent):
        return _is_sum_of_halves(parent, ups, down)


def _is_sum_of_halves(parent: nn.Module, ups: list[str], down: str) -> bool:
    wide, narrow = parent.get_submodule(ups[0]), parent.get_submodule(down)
    assert isinstance(wide, nn.Linear), "pairs are of linear layers"
    assert isinstance(narrow, nn.Linear), "pairs are of linear layers"
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 3, wide.in_features, generator=generator).to(wide.weight)
    matrix = narrow.weight
    if not bool(matrix.any()):  # initialised so that a block does nothing at first
        matrix = torch.randn(matrix.shape, generator=generator).to(matrix) / matrix.shape[1] ** 0.5
    half = wide.out_features // 2
    try:
        whole = functional_call(parent, {f"{down}.weight": matrix}, (given,))
    except Exception:
        # It takes other arguments than one tensor: the comparison on the first batch will see it run.
        return True
    if not isinstance(whole, Tensor):
        return True
    try:
        parts = [
            functional_call(parent, _part(parent, ups, down, matrix, rows), (given,))
            for rows in (slice(None, half), slice(half, None))
        ]
    except Exception:
        # Its own code, on half of what it expects, may raise anything.
        return False
    if any(part.shape != whole.shape for part in parts):
        return False
    bias = 0 if narrow.bias is None else narrow.bias
    return bool((parts[0] + parts[1] - bias - whole).norm() <= _ROUNDING * (whole - bias).norm())


def _part(parent: nn.Module, ups: list[str], down: str, matrix: Tensor, rows: slice) -> dict[str, Tensor]:
    values = {f"{down}.weight": matrix[:, rows]}
    for name in ups:
        for kind, param in parent.get_submodule(name).named_parameters(recurse=False):
            values[f"{name}.{kind}"] = param[rows]
    return values


@dataclass(frozen=True)
class TensorPlan:
    """What tensor parallelism does to each module with parameters of its own."""

    tp: int
    config: TensorConfig
    modules: tuple[PlannedModule, ...]
    attributes: tuple[AttributeChange, ...] = ()
    source: str = FOUND
    """Who says so: the model, its author, or its structure."""

    def style_of(self, name: str) -> SplitStyle:
        """How a module is split; REPLICATED for one that the plan does not name."""
        return next((row.style for row in self.modules if row.name == name), SplitStyle.REPLICATED)

    @property
    def num_split(self) -> int:
        """The number of modules that are split."""
        return sum(row.cut is not None for row in self.modules)

    def for_compiled_layers(self) -> TensorPlan:
        """The same plan with fused layers gathered: torch cannot compile what describes their split output.

        Attention then runs whole on every rank: right, but slower than with separate projections.
        """
        note = "gathered, because layers are compiled"
        rows = (
            dataclasses.replace(row, style=SplitStyle.COLUMN_GATHERED, note=note)
            if row.style is SplitStyle.COLUMN and row.cut is not None and row.cut.sections
            else row
            for row in self.modules
        )
        return dataclasses.replace(self, modules=tuple(rows))

    def describe(self) -> Table:
        """A table for rich: module, style, shape of its weight before and, on the first rank, after."""
        return self._table(self.modules)

    def describe_patterns(self) -> Table:
        """The same table, with one row for modules that differ only in a number of their name."""
        alike: dict[PlannedModule, int] = {}
        for row in self.modules:
            general = dataclasses.replace(row, name=generic_name(row.name))
            alike[general] = alike.get(general, 0) + 1
        return self._table(
            dataclasses.replace(row, note=", ".join(filter(None, (f"{count} of them" if count > 1 else "", row.note))))
            for row, count in alike.items()
        )

    def _table(self, rows: Iterable[PlannedModule]) -> Table:
        title = f"tensor parallel, tp {self.tp}, {self.source}"
        table = Table("module", "class", "style", "weight", "on each rank", "", title=title)
        for row in rows:
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
    spread: Collection[str] = (),
) -> TensorPlan:
    """The plan for a model: as it declares itself, else found by the classes, names and shapes of its layers.

    `overrides` maps patterns of names (`blocks.*.fc1`) to styles and overrides what was found, also that of
    `tensor.overrides`; every pattern must match something. `spread` names modules of experts that mesh.ep places.
    Changes nothing and needs no process group. Raises ConfigurationError if heads do not divide or nothing can be
    split.
    """
    chosen = config or TensorConfig()
    with trying(model):  # a weight that is computed, as by spectral_norm, changes buffers when it is read
        plan = _planned_layers(model, tp, chosen, overrides or {}, spread)
    if tp > 1 and not plan.num_split:
        raise ConfigurationError(
            f"mesh.tp {tp}: found no layer that tensor parallelism can split",
            hint='name the layers: overrides={"encoder.*.first": "column_local", "encoder.*.second": "row"}',
            modules=[name for name, module in model.named_modules() if isinstance(module, nn.Linear)][:6],
        )
    return plan


def _planned_layers(
    model: nn.Module,
    tp: int,
    config: TensorConfig,
    overrides: Mapping[str, SplitStyle | str],
    spread: Collection[str],
) -> TensorPlan:
    wanted = _overridden(model, {**config.override_styles(), **overrides})
    anatomy = _anatomy(model)
    if anatomy is not None and anatomy.tensor_plan:
        _refuse_experts_on_sequence(anatomy, config)
        found = declared_rows(model, anatomy, tp=tp, config=config, overrides=wanted, left_alone=spread)
        return TensorPlan(tp, config, found.rows, found.attributes, anatomy.source)
    by_name = {row.name: row for row in _found(model, tp, config, wanted)}
    rows = {
        name: planned(name, module, wanted[name], note="override") if name in wanted else by_name[name]
        for name, module in model.named_modules()
        if name in by_name or name in wanted
    }
    # A head that nothing shows to be one is whole, and so is the embedding whose weight it has.
    return TensorPlan(tp, config, tuple(with_tied_whole(tied_params(model), rows).values()))


def _anatomy(model: nn.Module) -> ModelAnatomy | None:
    """What the model consists of; None where it has no blocks: then its layers speak for themselves."""
    try:
        return anatomy_of(model)
    except InvalidArgument:
        if hasattr(model, "torsh_anatomy"):
            raise
        return None


def _refuse_experts_on_sequence(anatomy: ModelAnatomy, config: TensorConfig) -> None:
    if config.sequence_parallel and anatomy.experts:
        raise ConfigurationError(
            "tensor.sequence_parallel does not support this model: its experts take tokens of whole sequences",
            hint="set tensor.sequence_parallel = false",
            experts=anatomy.experts[0],
        )


def _overridden(model: nn.Module, overrides: Mapping[str, SplitStyle | str]) -> dict[str, SplitStyle]:
    modules = dict(model.named_modules())
    params = dict(model.named_parameters())
    stacks = [name for name, param in params.items() if name.rpartition(".")[2] not in ("weight", "bias")]
    out: dict[str, SplitStyle] = {}
    for pattern, name in overrides.items():
        style = style_named(name, where=f"overrides[{pattern!r}]")
        matched = [one for one in [*modules, *stacks] if one and fnmatchcase(one, pattern)]
        if not matched:
            near = did_you_mean(pattern, [one for one in modules if one])
            raise ConfigurationError(
                f"overrides[{pattern!r}] matches no module",
                hint=near or "patterns match whole names, such as blocks.*.fc1",
                modules=[one for one in modules if one][:8],
                key="tensor.overrides",
            )
        out.update({one: style for one in matched if one in params or _has_params(modules[one])})
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
        if {*pair.up, pair.down} <= wanted.keys():
            continue
        up, note = SplitStyle.COLUMN_LOCAL if pair.is_elementwise else SplitStyle.COLUMN, ""
        if not splits_between(model, pair):
            up, note = SplitStyle.COLUMN_GATHERED, "gathered, because all features are needed before the next layer"
        for name in pair.up:
            yield planned(name, modules[name], up, note=note)
        yield planned(pair.down, modules[pair.down], SplitStyle.ROW)
    whole = SplitStyle.SEQUENCE if config.sequence_parallel else SplitStyle.REPLICATED
    for name, module in modules.items():
        if structure.is_head(name, module):
            style = SplitStyle.COLUMN if config.loss_parallel else SplitStyle.COLUMN_GATHERED
            yield dataclasses.replace(planned(name, module, style), is_head=True)
        elif structure.is_position_table(name, module) or structure.is_norm(module):
            yield planned(name, module, whole)
        elif isinstance(module, nn.Embedding) and structure.has_own_weight(module):
            yield planned(name, module, SplitStyle.VOCABULARY)
        elif _has_params(module):
            yield planned(name, module, SplitStyle.REPLICATED)


def _attention_rows(modules: Mapping[str, nn.Module], found: structure.Attention, tp: int) -> Iterator[PlannedModule]:
    if found.num_heads is None or found.num_key_value_heads is None:
        raise ConfigurationError(
            f"the number of heads of {found.where or 'the model'} is not known, so they cannot be split",
            hint=f"give the module an attribute {structure.HEAD_COUNTS[0]}, or override its layers with 'replicated'",
            looked_for=structure.HEAD_COUNTS,
            key="tensor.overrides",
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
        yield planned(found.fused, layer, style, sections=sections, note=note)
    for name in found.split:
        yield planned(name, modules[name], SplitStyle.COLUMN, note=f"{heads // tp} of {heads} heads on each rank")
    yield planned(found.out, modules[found.out], SplitStyle.ROW)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _show(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "-"
