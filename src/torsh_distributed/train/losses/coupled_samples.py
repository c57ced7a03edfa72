"""What in a model makes a sample's loss depend on the others of its batch, said or refused before the first step."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.data.synced_batch_norm import batch_norms
from torsh_distributed.plan import Plan

_log = logging.getLogger(__name__)


def check_coupled_samples(model: nn.Module, plan: Plan, *, data_degree: int) -> None:
    """Refuse losses over all tokens of a batch that is divided; warn of BatchNorm. Every rank calls this."""
    microbatches = plan.pipeline.num_microbatches if plan.mesh.pp > 1 else 1
    passes = plan.training.gradient_accumulation * microbatches
    if data_degree == 1 and passes == 1:
        return
    config: Any = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0):
        raise ConfigurationError(
            f"{type(model).__name__} has output_router_logits = True: its load-balancing loss is over all tokens of a"
            f" batch, and {data_degree} ranks and {passes} passes have only their own",
            hint="set model.config.output_router_logits = False; or build the model with td.MoELayer, whose"
            " load-balancing loss is over the batch of all ranks",
            keys=("mesh.dp", "mesh.shard", "training.gradient_accumulation"),
        )
    names = batch_norms(model)
    if not names or process_group.rank() != 0:
        return
    if passes > 1:
        _log.warning(
            "%d BatchNorm layers (%s, …) normalise each of the %d passes of a step by itself: losses differ from"
            " those of one pass; training.gradient_accumulation = 1 avoids it",
            len(names),
            names[0],
            passes,
        )
    if data_degree > 1 and not plan.training.sync_batch_norm:
        _log.warning(
            "%d BatchNorm layers (%s, …) normalise by the samples of each rank alone: losses differ from those of one"
            " process; training.sync_batch_norm = true makes them equal",
            len(names),
            names[0],
        )
