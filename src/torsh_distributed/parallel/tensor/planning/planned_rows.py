"""One row of a tensor plan: a module or parameter, its style, and how its weight is cut."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.structure import is_transposed, widths
from torsh_distributed.parallel.tensor.split_params import TensorCut, can_be_split
from torsh_distributed.plan.problems import did_you_mean


class SplitStyle(StrEnum):
    """How a module is split."""

    COLUMN = "column"
    """A linear layer split by output features; what follows sees the whole shape (a DTensor)."""
    COLUMN_LOCAL = "column_local"
    """A linear layer split by output features; what follows sees this rank's piece, such as its heads."""
    COLUMN_GATHERED = "column_gathered"
    """A linear layer split by output features, its output gathered."""
    COLUMN_PACKED = "column_packed"
    """Two layers fused into one: each half is split by output features; what follows sees this rank's pieces."""
    ROW = "row"
    """A linear layer split by input features, its output summed."""
    ROW_PACKED = "row_packed"
    """The same for an input of two fused halves."""
    VOCABULARY = "vocabulary"
    """An embedding split by rows."""
    EMBEDDING_WIDTH = "embedding_width"
    """An embedding split by columns, its output gathered."""
    KEY_VALUE = "key_value"
    """Keys or values of fewer heads than ranks: whole on every rank, which keeps the heads its queries use."""
    LATENT = "latent"
    """A whole layer whose last outputs go to the heads of all ranks: their gradient is summed."""
    SHARED = "shared"
    """Whole on every rank, but applied to this rank's heads: gradients of its parameters are summed."""
    EXPERTS = "experts"
    """A module of experts, each split by features; outputs are summed."""
    IDENTITY_EXPERT = "identity_expert"
    """An expert without parameters among split ones: each rank adds its part of the input."""
    SUMMED = "summed"
    """The module's output is summed over ranks."""
    SEQUENCE = "sequence"
    """A norm or position table that works on this rank's piece of the sequence."""
    REPLICATED = "replicated"
    """Whole on every rank."""


FROM_TRANSFORMERS: dict[str, SplitStyle] = {
    "colwise": SplitStyle.COLUMN_LOCAL,
    "colwise_gather_output": SplitStyle.COLUMN_GATHERED,
    "colwise_rep": SplitStyle.COLUMN_GATHERED,
    "packed_colwise": SplitStyle.COLUMN_PACKED,
    "rowwise": SplitStyle.ROW,
    "rowwise_split_input": SplitStyle.ROW,
    "rowwise_rep": SplitStyle.ROW,
    "packed_rowwise": SplitStyle.ROW_PACKED,
    "embedding_rowwise": SplitStyle.VOCABULARY,
    "embedding_colwise": SplitStyle.EMBEDDING_WIDTH,
    "mla_kv_a_proj": SplitStyle.LATENT,
    "replicated_with_grad_allreduce": SplitStyle.SHARED,
    "moe_tp_experts": SplitStyle.EXPERTS,
    "moe_identity_expert": SplitStyle.IDENTITY_EXPERT,
    "all_reduce": SplitStyle.SUMMED,
    "replicate": SplitStyle.REPLICATED,
    "keep_full_weight": SplitStyle.REPLICATED,
}
"""Names in transformers' tensor plans."""

EXPERT_PLAN_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts", "ep_router"})
"""Names in transformers' expert plans: mesh.ep places these modules, tensor parallelism leaves them alone."""


def style_named(name: str, *, where: str) -> SplitStyle:
    """The style of this name, ours or transformers'; ConfigurationError for another one."""
    if name in FROM_TRANSFORMERS:
        return FROM_TRANSFORMERS[name]
    if name in EXPERT_PLAN_STYLES:
        return SplitStyle.REPLICATED
    if name not in tuple(SplitStyle):
        known = [*SplitStyle, *FROM_TRANSFORMERS]
        raise ConfigurationError(
            f"{where}: there is no style {name!r}",
            hint=did_you_mean(name, known) or f"one of {', '.join(known)}",
            key="tensor.overrides",
        )
    return SplitStyle(name)


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
