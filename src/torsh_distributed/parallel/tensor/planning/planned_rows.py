"""One row of a tensor plan: a module or parameter, its style, and how its weight is cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.structure import is_transposed, widths
from torsh_distributed.parallel.tensor.cut import TensorCut
from torsh_distributed.parallel.tensor.planning.styles import SplitStyle
from torsh_distributed.parallel.tensor.split_params import can_be_split


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
    is_param: bool = False
    """Whether the name is that of a parameter, not of a module."""
    is_head: bool = False
    """Whether its output is logits."""
    detail: tuple[int, ...] = ()
    """Numbers that the style needs: heads and key-value heads; or outputs that go to all heads."""


@dataclass(frozen=True)
class AttributeChange:
    """A number that a module must know about its part, such as its heads."""

    module: str
    name: str
    value: int


_COLUMNS = (SplitStyle.COLUMN, SplitStyle.COLUMN_LOCAL, SplitStyle.COLUMN_GATHERED)
_LINEAR = (*_COLUMNS, SplitStyle.COLUMN_PACKED, SplitStyle.ROW, SplitStyle.ROW_PACKED, SplitStyle.KEY_VALUE)
_TABLES = (SplitStyle.VOCABULARY, SplitStyle.EMBEDDING_WIDTH)


def planned(
    name: str, module: nn.Module, style: SplitStyle, *, sections: tuple[int, ...] = (), note: str = ""
) -> PlannedModule:
    """The row of a module; ConfigurationError if it is not of a kind that this style can split."""
    if (style in _LINEAR and widths(module) is None) or (style in _TABLES and not isinstance(module, nn.Embedding)):
        kind = "Embedding" if style in _TABLES else "Linear"
        raise ConfigurationError(
            f"{name} is a {type(module).__name__}, which cannot be split as {style.value!r}",
            hint=f"this style is for {kind}; use 'replicated' to leave the module whole",
            key="tensor.overrides",
        )
    plain = nn.Embedding if style in _TABLES else nn.Linear
    if style in (*_LINEAR, *_TABLES) and not can_be_split(module, plain):
        raise ConfigurationError(
            f"{name}: {type(module).__name__} computes its forward by itself, so it cannot be split",
            hint=f"leave it whole: tensor.overrides {name}=replicated",
        )
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    return PlannedModule(name, type(module).__name__, style, shape, _cut(name, module, style, sections), note)


def planned_param(name: str, param: Tensor, style: SplitStyle) -> PlannedModule:
    """The row of a parameter: experts keep matrices as (experts, out, in), vectors have one entry for each output."""
    shape = tuple(param.shape)
    out_dim, in_dim = max(param.dim() - 2, 0), param.dim() - 1
    cuts = {
        SplitStyle.COLUMN_LOCAL: TensorCut(out_dim),
        SplitStyle.COLUMN_PACKED: TensorCut(out_dim, _halves(name, shape[out_dim]) if param.dim() > 1 else ()),
        SplitStyle.ROW: TensorCut(in_dim) if param.dim() > 1 else None,
        SplitStyle.ROW_PACKED: TensorCut(in_dim, _halves(name, shape[in_dim])) if param.dim() > 1 else None,
        SplitStyle.REPLICATED: None,
    }
    if style not in cuts:
        raise ConfigurationError(
            f"{name} is a parameter, which cannot be split as {style.value!r}",
            hint=f"one of {', '.join(cuts)}",
            key="tensor.overrides",
        )
    return PlannedModule(name, "Parameter", style, shape, cuts[style], is_param=True)


def _cut(name: str, module: nn.Module, style: SplitStyle, sections: tuple[int, ...]) -> TensorCut | None:
    out_dim, in_dim = (1, 0) if is_transposed(module) else (0, 1)
    found = widths(module)
    if style in _COLUMNS:
        return TensorCut(out_dim, sections)
    if style is SplitStyle.ROW:
        return TensorCut(in_dim, sections)
    if found is not None and style is SplitStyle.COLUMN_PACKED:
        return TensorCut(out_dim, sections or _halves(name, found[1]))
    if found is not None and style is SplitStyle.ROW_PACKED:
        return TensorCut(in_dim, sections or _halves(name, found[0]))
    return {SplitStyle.VOCABULARY: TensorCut(0), SplitStyle.EMBEDDING_WIDTH: TensorCut(1)}.get(style)


def _halves(name: str, width: int) -> tuple[int, int]:
    if width % 2:
        raise ConfigurationError(
            f"{name}: two layers fused into one of width {width} are not of equal width",
            hint="override it with 'column_gathered' or 'replicated'",
            key="tensor.overrides",
        )
    return (width // 2, width // 2)
