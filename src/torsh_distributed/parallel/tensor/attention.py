"""Attention with its heads spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


class ParallelAttention(nn.Module):
    """Self-attention whose heads are split over the mesh: each rank attends with its own, the outputs are summed.

    Query, key and value are one fused layer (`query_key_value`), in that order; with `num_key_value_heads` below
    `num_heads` several query heads share a key and value head (grouped-query). in and out: (batch, length,
    hidden_size), whole.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        mesh: DeviceMesh,
        num_key_value_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        is_causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        key_value_heads = num_key_value_heads or num_heads
        if hidden_size % num_heads or num_heads % key_value_heads:
            raise ConfigurationError(
                "heads must divide the hidden size, and key-value heads the heads",
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_key_value_heads=key_value_heads,
                key="mesh.tp",
            )
        check_heads(num_heads, key_value_heads, mesh.size(), where="ParallelAttention")
        self.head_dim, self.dropout, self.is_causal = hidden_size // num_heads, dropout, is_causal
        self.num_local_heads = num_heads // mesh.size()
        self.num_local_key_value_heads = key_value_heads // mesh.size()
        widths = (hidden_size, key_value_heads * self.head_dim, key_value_heads * self.head_dim)
        self.query_key_value = ColumnParallelLinear(
            hidden_size, sum(widths), bias, mesh=mesh, output="local", sections=widths, device=device, dtype=dtype
        )
        self.projection = RowParallelLinear(
            hidden_size, hidden_size, bias, mesh=mesh, input_is_parallel=True, device=device, dtype=dtype
        )

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        heads, shared = self.num_local_heads, self.num_local_key_value_heads
        fused = self.query_key_value(hidden).unflatten(-1, (heads + 2 * shared, self.head_dim)).transpose(1, 2)
        query, key, value = fused.split([heads, shared, shared], dim=1)
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            enable_gqa=heads != shared,
        )
        out: Tensor = self.projection(attended.transpose(1, 2).flatten(2))
        return out


def check_heads(num_heads: int, num_key_value_heads: int | None, tp: int, *, where: str) -> None:
    """Refuse heads that do not split over `tp` ranks, naming the degrees that would fit.

    Without `num_key_value_heads`, keys and values may be on several ranks.
    """
    num_key_value_heads = num_key_value_heads or num_heads
    if num_heads % tp == 0 and num_key_value_heads % tp == 0:
        return
    fitting = [
        degree
        for degree in range(1, num_key_value_heads + 1)
        if num_heads % degree == 0 and num_key_value_heads % degree == 0
    ]
    kinds = f"{num_heads} heads"
    if num_key_value_heads != num_heads:
        kinds += f" with {num_key_value_heads} key-value heads"
    raise ConfigurationError(
        f"mesh.tp {tp}: {where} has {kinds}, which {tp} ranks cannot share evenly",
        hint=f"choose tp from {', '.join(map(str, fitting))}, or override the layers of {where} with 'replicated'",
        tp=tp,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
    )
