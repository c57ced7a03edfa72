"""Which number formats are used where: the `precision` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section, Words


class PrecisionConfig(Section):
    """Formats of computation and reduction. Parameters and optimizer state stay in fp32."""

    dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Format of matrix products and activations. fp16 comes with loss scaling; bf16 needs none. fp8 computes the
    products of linear layers in 8 bits and all else in bf16: faster on wide layers, with compile.enabled."""

    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How values are scaled to the range of fp8: one scale for a tensor (fastest), one for each row (an outlier costs
    precision to its row only), or rows with the gradients of weights in bf16 (most exact)."""

    fp8_fast_accumulation: bool = False
    """Sum the products of gradients with the fewer bits of the hardware's fast mode, as those of forward always are."""

    fp8_skip: Words = ()
    """Patterns of linear layers that stay in bf16 under fp8, matched part by part. The head, and layers whose sizes are
    not multiples of 16, always do."""

    fp8_emulate: bool = False
    """Compute fp8 products in fp32 from rounded values: the same numbers without the speed, for devices without fp8."""

    reduce_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format in which gradients are summed over ranks; `same` keeps theirs."""

    buffer_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format of the model's buffers; `same` does not change them."""

    init_loss_scale: float = Field(default=65536.0, gt=0)
    """First loss scale under fp16. It halves on overflow."""

    loss_scale_growth_interval: int = Field(default=2000, ge=1)
    """Steps without overflow after which the loss scale doubles."""
