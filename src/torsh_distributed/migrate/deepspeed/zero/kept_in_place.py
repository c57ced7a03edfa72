"""`engine.to(device)`, `engine.module.half()` and their relatives, for a module whose parameters are sharded.

Scripts call them after `initialize`, mostly with the device and the format that the module has. Torch would replace the
shards even so, and cannot: the engine knows them by identity. So nothing is done, or the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torsh_distributed.errors import FeatureNotAvailable


def keep_in_place(model: nn.Module) -> None:
    """From now on calls that would move or cast sharded parts of the model do nothing, or raise."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__dict__["_apply"] = _applier(module)  # of this module alone


def _applier(module: nn.Module) -> Callable[..., nn.Module]:
    def apply(change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """In the place of torch's `_apply`, which every such call comes to."""
        for dtype, device in {(param.dtype, param.device) for param in module.parameters()}:
            # An empty tensor shows what the call does.
            got = change(torch.empty(0, dtype=dtype, device=device))
            if (got.dtype, got.device) != (dtype, device):
                raise FeatureNotAvailable(
                    f"the engine's module is {dtype} on {device} and cannot become {got.dtype} on {got.device}: its"
                    " parameters are sharded",
                    hint="move or cast the model before deepspeed.initialize; bf16 and fp16 of the config choose its"
                    " format",
                )
        return module

    return apply
