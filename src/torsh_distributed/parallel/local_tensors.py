"""This rank's part of a tensor that may be a DTensor, and all of it.

Told by what the tensor can do, not by its type: importing DTensor takes a second that many jobs need not spend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """All of a DTensor, for which its ranks communicate; any other tensor itself."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is spread over ranks."""
    return hasattr(tensor, "to_local")
