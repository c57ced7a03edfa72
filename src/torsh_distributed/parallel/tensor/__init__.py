"""Tensor parallelism: every layer's matrices split between ranks."""

from torsh_distributed.parallel.tensor.apply import param_cuts, tensor_parallel, tensor_parallel_context
from torsh_distributed.parallel.tensor.attention import ParallelAttention
from torsh_distributed.parallel.tensor.cut import Cut
from torsh_distributed.parallel.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torsh_distributed.parallel.tensor.plan import PlannedModule, Style, TensorPlan, find_tensor_plan

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "ParallelAttention",
    "ParallelEmbedding",
    "PlannedModule",
    "RowParallelLinear",
    "Style",
    "TensorPlan",
    "find_tensor_plan",
    "param_cuts",
    "tensor_parallel",
    "tensor_parallel_context",
]
