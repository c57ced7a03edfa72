"""The class that a user wrote, beneath those that wrappers derive from it."""

from __future__ import annotations

from torch import nn


def user_class(model: nn.Module) -> type[nn.Module]:
    """The user's own class: FSDP2 gives a sharded model a class derived from it."""
    from torch.distributed.fsdp import FSDPModule

    return next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule) and issubclass(one, nn.Module))
