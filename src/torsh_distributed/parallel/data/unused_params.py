"""Which parameters a loss does not depend on: they get no gradient, and nobody must wait for one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.collectives.objects import all_gather_object

_log = logging.getLogger(__name__)

_NUM_SHOWN = 3


def has_unused_params(loss: Tensor, params: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> bool:
    """Whether on any rank the graph of `loss` leaves a parameter out; every rank of the group calls this."""
    used = _params_behind(loss)
    mine = [] if used is None else [name for name, param in params.items() if id(param) not in used]
    found = next(filter(None, all_gather_object(mine[: _NUM_SHOWN + 1], group=group)), None)
    if found is not None and dist.get_rank() == 0:
        more = ", …" if len(found) > _NUM_SHOWN else ""
        _log.warning(
            "the loss does not depend on %s%s: gradients are searched for in every step, as by"
            " ddp.find_unused_parameters; freeze what is not trained (requires_grad_(False)) to save that",
            ", ".join(found[:_NUM_SHOWN]),
            more,
        )
    return found is not None


def _params_behind(loss: Tensor) -> set[int] | None:
    """The ids of the parameters in the graph of `loss`; None where a part of it is computed only in backward."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        waiting.extend(before for before, _ in node.next_functions)
    return found
