"""The ways in which a module or a parameter is split, and the names that transformers gives them."""

from __future__ import annotations

from enum import StrEnum

from torsh_distributed.errors import ConfigurationError
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
