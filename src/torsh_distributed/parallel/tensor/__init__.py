"""Tensor parallelism: `planning` chooses how modules are split, `apply` splits them, `layers` and `adapted` compute."""

from torsh_distributed.parallel.tensor.apply import tensor_parallel, tensor_parallel_context
from torsh_distributed.parallel.tensor.attention import ParallelAttention
from torsh_distributed.parallel.tensor.embedding import ParallelEmbedding
from torsh_distributed.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from torsh_distributed.parallel.tensor.planning.planned_rows import PlannedModule, SplitStyle
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan, find_tensor_plan
from torsh_distributed.parallel.tensor.split_params import TensorCut, cut_lengths, param_cuts

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
