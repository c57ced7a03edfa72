"""Values of an optimizer that only some ranks have, sent to all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.objects import all_gather_object


def values_of_owners(mine: dict[str, dict[str, Any]], group: dist.ProcessGroup) -> dict[str, dict[str, Any]]:
    """Each parameter's values, sent by the first rank that has them; every rank of the group calls this."""
    described = {name: {key: _describe(value) for key, value in values.items()} for name, values in mine.items()}
    found: dict[str, dict[str, Any]] = {}
    for owner, theirs in enumerate(all_gather_object(described, group=group)):
        for name, kinds in theirs.items():
            if name not in found:
                held = mine[name] if owner == group.rank() else {}
                found[name] = {
                    key: sent_by(owner, held.get(key), group) if isinstance(kind, list) else kind
                    for key, kind in kinds.items()
                }
    return found


def sent_by(owner: int, value: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """The tensor of a rank of the group, on every rank of it."""
    if group.size() == 1:
        assert value is not None, "the only rank has everything"
        return value
    header = None if value is None else [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
    shape, dtype, device = all_gather_object(header, group=group)[owner]
    held = torch.empty(shape, dtype=getattr(torch, dtype), device=device) if value is None else value.contiguous()
    dist.broadcast(held, group=group, group_src=owner)
    return held


def _describe(value: Any) -> Any:
    return ["tensor"] if isinstance(value, Tensor) else value
