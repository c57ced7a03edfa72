"""Tensor parallelism: `rules` and `plan` choose how layers are split, `apply` splits them, `layers` compute."""

from torsh_distributed.parallel.tensor.apply import cut_lengths, param_cuts, tensor_parallel, tensor_parallel_context
from torsh_distributed.parallel.tensor.attention import ParallelAttention
from torsh_distributed.parallel.tensor.cut import TensorCut
from torsh_distributed.parallel.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torsh_distributed.parallel.tensor.tensor_plan import PlannedModule, SplitStyle, TensorPlan, find_tensor_plan

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelEmbedding",
    "PlannedModule",
    "RowParallelLinear",
    "SplitStyle",
    "TensorCut",
    "TensorPlan",
    "cut_lengths",
    "find_tensor_plan",
    "param_cuts",
    "tensor_parallel",
    "tensor_parallel_context",
]
