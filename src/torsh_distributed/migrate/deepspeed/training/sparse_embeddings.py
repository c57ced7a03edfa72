"""Embeddings with sparse gradients: what travels between ranks is dense, and SparseAdam gets it sparse again."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.parallel.data.ddp import sparse_modules

_log = logging.getLogger(__name__)


def average_dense(model: nn.Module, optimizer: Optimizer, settings: RunSettings) -> None:
    """Let embeddings give dense gradients, which can be accumulated, clipped and sharded; the sums are the same.

    SparseAdam takes nothing but sparse ones, and updates the rows that are in them alone: it gets the rows that are not
    zero. It works on whole fp32 parameters, so without ZeRO.
    """
    names = sparse_modules(model)
    for name in names:
        model.get_submodule(name).sparse = False  # type: ignore[assignment]  # an embedding's flag
    if names:
        _log.info("the gradients of %s travel dense: the result is the same", ", ".join(names))
    if isinstance(optimizer, SparseAdam):
        require(
            settings.stage == 0 and settings.dtype is torch.float32,
            "SparseAdam works with zero_optimization.stage 0 in fp32",
            hint="use AdamW, whose gradients may be sharded",
        )
        optimizer.register_step_pre_hook(_give_sparse)


def _give_sparse(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)
