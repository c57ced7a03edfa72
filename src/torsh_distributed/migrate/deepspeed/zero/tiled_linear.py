"""`deepspeed.zero.TiledLinear`: a linear layer in tiles, so that stage 3 gathers one tile at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.pipe.pipeline_module import partition_uniform


class TiledLinear(nn.Module):
    """`in_splits` × `out_splits` linear layers that compute as one; the inputs may come split already."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        require(1 <= in_splits <= in_features, "in splits must be in range [1, in_features]", in_splits=in_splits)
        require(1 <= out_splits <= out_features, "out splits must be in range [1, out_features]", out_splits=out_splits)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = (
            partition_uniform(in_features, in_splits),
            partition_uniform(out_features, out_splits),
        )
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    self.in_parts[col + 1] - self.in_parts[col],
                    self.out_parts[row + 1] - self.out_parts[row],
                    bias=bias and col == in_splits - 1,
                    **kwargs,
                )
                for col in range(in_splits)
            )
            for row in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @override
    def forward(self, input_: Any) -> Any:
        inputs = input_ if self.input_is_already_split else self._split(input_)
        outputs = []
        for row in self.linears:
            assert isinstance(row, nn.ModuleList), "made above"
            parts = [linear(one) for linear, one in zip(row, inputs, strict=True)]
            outputs.append(sum(parts[1:], parts[0]))
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _split(self, value: Tensor) -> list[Tensor]:
        sizes = [self.in_parts[col + 1] - self.in_parts[col] for col in range(self.in_splits)]
        return list(torch.split(value, sizes, dim=-1))

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the weights of a whole layer."""
        for row, linears in enumerate(self.linears):
            rows = slice(self.out_parts[row], self.out_parts[row + 1])
            assert isinstance(linears, nn.ModuleList), "made above"
            for col, linear in enumerate(linears):
                assert isinstance(linear, nn.Linear), "a layer whose weights can be copied"
                linear.weight.copy_(other.weight[rows, self.in_parts[col] : self.in_parts[col + 1]])
                if linear.bias is not None and other.bias is not None:
                    linear.bias.copy_(other.bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """The same for layers that return `(output, bias)`, as Megatron's do; biases are returned, not added."""

    @override
    def forward(self, input_: Any) -> Any:
        inputs = input_ if self.input_is_already_split else self._split(input_)
        outputs, biases = [], []
        for row in self.linears:
            assert isinstance(row, nn.ModuleList), "made above"
            parts = [linear(one) for linear, one in zip(row, inputs, strict=True)]
            outputs.append(sum((part[0] for part in parts[1:]), parts[0][0]))
            biases.append(parts[-1][1])
        bias = None if biases[0] is None else torch.cat(biases, dim=-1)
        return (torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs), bias
