"""Which number formats are used where: the `precision` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section


class PrecisionConfig(Section):
    """Formats of computation and reduction. Parameters and optimizer state stay in fp32."""

    dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Format of matrix products and activations. fp16 comes with loss scaling; bf16 needs none."""

    reduce_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format in which gradients are summed over ranks; `same` keeps theirs."""

    buffer_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format of the model's buffers; `same` does not change them."""

    init_loss_scale: float = Field(default=65536.0, gt=0)
    """First loss scale under fp16. It halves on overflow."""

    loss_scale_growth_interval: int = Field(default=2000, ge=1)
    """Steps without overflow after which the loss scale doubles."""
