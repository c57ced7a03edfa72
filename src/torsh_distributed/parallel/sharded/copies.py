"""Copies of sharded models, which scripts make for moving averages of weights: refused with what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torsh_distributed.errors import FeatureNotAvailable


def explain_copies(model: nn.Module) -> None:
    """Let copies of the sharded modules of `model` raise what to do; FSDP2's own error does not say it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            type(module).__deepcopy__ = _refuse  # type: ignore[attr-defined]  # made by fully_shard, which defines it


def _refuse(module: nn.Module, memo: Any) -> NoReturn:
    raise FeatureNotAvailable(
        "a model under mesh.shard cannot be copied: a rank holds shards of its parameters, and gathers them for its own"
        " forward only",
        hint="for a moving average (AveragedModel, EMA), copy the model before parallelize() and update the copy from"
        " engine.whole_weights() after a step; or use mesh.dp, where engine.unwrapped is whole",
        feature="copy.deepcopy",
    )
