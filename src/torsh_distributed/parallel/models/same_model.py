"""Checks, before the first step, that all ranks hold the same model; names the difference on every rank."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import TensorShapeMismatch


def user_class(model: nn.Module) -> type[nn.Module]:
    """The user's own class: FSDP2 gives a sharded model a class derived from it."""
    from torch.distributed.fsdp import FSDPModule

    return next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule) and issubclass(one, nn.Module))


_ABSENT = "not there"


def check_same_model(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise TensorShapeMismatch on every rank, naming parameter and ranks, unless all of the group (the world) agree.

    Compares names, order, shapes, dtypes, what is trained and what is shared; not values. Ranks exchange a hash, and
    the description only if it differs.
    """
    members = resolve_group(group)
    if members.size() == 1:
        return
    mine = _description(model)
    digest = hashlib.sha256(repr(list(mine.items())).encode()).hexdigest()
    if len(set(all_gather_object(digest, group=members))) == 1:
        return
    ranks = dist.get_process_group_ranks(members)
    found: list[dict[str, str]] = all_gather_object(mine, group=members)
    for name in dict.fromkeys(name for one in found for name in one):
        seen: dict[str, list[int]] = {}
        for rank, one in zip(ranks, found, strict=True):
            seen.setdefault(one.get(name, _ABSENT), []).append(rank)
        if len(seen) > 1:
            said = "; ".join(f"{what} on {_ranks(members)}" for what, members in seen.items())
            raise TensorShapeMismatch(
                f"the model differs between ranks: {name} is {said}",
                hint="build the model from the same code and config on every rank",
                parameter=name,
            )
    raise TensorShapeMismatch(
        "the model differs between ranks: the same parameters are in another order",
        hint="build the modules in the same order on every rank; do not iterate over sets",
    )


def _description(model: nn.Module) -> dict[str, str]:
    """What each parameter and buffer is, by name, in the model's order."""
    first: dict[int, str] = {}
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        shared = first.setdefault(id(param), name)
        what = f"{tuple(param.shape)} {str(param.dtype).removeprefix('torch.')}"
        found[name] = what + ("" if param.requires_grad else " frozen") + ("" if shared == name else f", is {shared}")
    for name, buffer in model.named_buffers():
        found[name] = f"{tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')} buffer"
    return found


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
