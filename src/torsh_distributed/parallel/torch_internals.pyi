# Its limits, counters and errors; lazy, because importing it takes seconds.
from torch import _dynamo as _dynamo

# One call for many tensors, here and below; torch.optim uses them, and offers no public ones.
from torch import _foreach_add_ as _foreach_add_
from torch import _foreach_copy_ as _foreach_copy_
from torch import _foreach_mul_ as _foreach_mul_
from torch import _foreach_norm as _foreach_norm

# The kernels of torch.optim.Adam(fused=True), for parts of parameters.
from torch import _fused_adam_ as _fused_adam_
from torch import _fused_adamw_ as _fused_adamw_

# Whether a backward runs, and which one.
from torch._C import _current_graph_task_id as _current_graph_task_id

# As in DDP: many tensors as one, and back.
from torch._utils import _flatten_dense_tensors as _flatten_dense_tensors
from torch._utils import _unflatten_dense_tensors as _unflatten_dense_tensors

# The group of an event, which has its name.
from torch.distributed.distributed_c10d import _resolve_process_group as _resolve_process_group

# Argument types of the public set_custom_all_gather and set_custom_reduce_scatter.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter

# FSDP2's record of a parameter: the padded shard that it gathers, which offload keeps elsewhere.
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam

# What draws numbers for pieces of DTensors.
from torch.distributed.tensor import _random as _random

# Where a shard lies in its tensor, uneven ones too.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as compute_local_shape_and_global_offset  # isort: skip # fmt: skip # noqa: E501

# The placement of a tensor that is both split and sharded.
from torch.distributed.tensor.placement_types import _StridedShard as _StridedShard

# The class of all batch norms.
from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm

# Its power iteration changes state in forward, which a check must not.
from torch.nn.utils.parametrizations import _SpectralNorm as _SpectralNorm

# Modes that a recomputation has to enter again.
from torch.overrides import _get_current_function_mode_stack as _get_current_function_mode_stack

# Nested collections of tensors; torch has no public form of these.
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

MEMBERS: dict[str, str]
