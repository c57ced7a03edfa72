"""All-reduce of sparse tensors: indices and values of all ranks are gathered, equal indices add up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.async_calls import allgather_async
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.collectives.reduction_names import Average, ReductionName, Sum
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set, set_size


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReductionName = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Sum or average a sparse tensor; returns a function that waits and returns the sparse result."""
    if not tensor.is_sparse:
        raise InvalidArgument("sparse_allreduce_async takes a sparse tensor", hint="call allreduce_async")
    if op not in (Average, Sum):
        raise InvalidArgument("sparse tensors can be summed or averaged", op=str(op))
    compact = tensor.detach() if tensor.is_coalesced() else tensor.detach().coalesce()
    indices = allgather_async(
        compact.indices().t().contiguous(), None if name is None else f"{name}.indices", process_set
    )
    values = allgather_async(compact.values().contiguous(), None if name is None else f"{name}.values", process_set)
    divisor = set_size(process_set) if op == Average else 1

    def wait() -> Tensor:
        all_indices, all_values = synchronize(indices), synchronize(values)
        if divisor > 1:
            all_values = all_values / divisor
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape)

    return wait
