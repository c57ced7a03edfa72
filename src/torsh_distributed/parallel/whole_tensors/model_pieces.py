"""Which parameters of an optimizer must be whole when it steps, under the way a strategy spreads the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.whole_state import StateParts, named_params
from torsh_distributed.parallel.whole_tensors.optimizer_needs import (
    DECLARATION,
    Needs,
    PieceForm,
    inner_optimizer,
    keeps_params,
    known_needs,
    tried_needs,
)
from torsh_distributed.parallel.whole_tensors.owner_update import OwnerUpdate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)

_SEVERITY: dict[Needs | None, int] = {"elements": 0, None: 1, "tensors": 2, "model": 3}


@dataclass(frozen=True)
class ModelPieces:
    """How parameters are spread over ranks, for an optimizer."""

    group: dist.ProcessGroup
    """The ranks that together hold every parameter of which this rank has a part."""
    forms: Sequence[PieceForm] = ()
    """The forms in which a rank may hold a part of a parameter when the optimizer steps."""
    has_all_params: bool = True
    """Whether this rank has a part of every parameter; in a pipeline it has those of its stages."""
    divides_replicas: bool = False
    """Whether ranks that hold the same parameters share the work and the state."""


def shard_form(mesh: DeviceMesh) -> PieceForm:
    """Rows as DTensors, over the last dim of the mesh, as FSDP2 and ZeRO-1 hold them."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    # src_data_rank=None: every rank takes its own part; nothing is sent.
    return lambda tensor: distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def cut_form(dim: int, group: dist.ProcessGroup) -> PieceForm:
    """A plain piece along a dim, as tensor parallelism and spread experts hold them."""

    def cut(tensor: Tensor) -> Tensor:
        parts = tensor.tensor_split(group.size(), dim=min(dim, tensor.dim() - 1))
        return parts[group.rank()].clone()

    return cut


def owner_update(optimizer: Optimizer, model: nn.Module, pieces: ModelPieces, parts: StateParts) -> OwnerUpdate | None:
    """Give the optimizer the whole of those parameters for which it needs that; None if it needs none.

    Every rank of the world calls this, once, with the optimizer over its final parameters. An optimizer that couples
    parameters which no rank has together is refused, on every rank.
    """
    if pieces.group.size() == 1 and pieces.has_all_params:
        return None
    needs = _needs_of_groups(optimizer, pieces)
    name = type(inner_optimizer(optimizer) or optimizer).__name__
    if "model" in needs:
        raise InvalidArgument(
            f"{name} updates a parameter by what the others are, and under this plan no rank has all of them",
            hint="use mesh.dp or mesh.cp, where every rank has the whole model; if its updates do depend on one tensor"
            f' alone, set {DECLARATION} = "tensors" on the optimizer',
        )
    if pieces.group.size() == 1 or all(one == "elements" for one in needs):
        return None
    if inner_optimizer(optimizer) is not None or keeps_params(optimizer):
        raise InvalidArgument(
            f"{type(optimizer).__name__} cannot be given whole tensors, which {name} needs: it keeps parameters or an"
            " optimizer of its own",
            hint="use mesh.dp, where every rank has whole tensors; or an element-wise optimizer such as AdamW",
        )
    names = {id(param): parts.first_name(name) for name, param in named_params(model).items()}
    chosen: Mapping[str, nn.Parameter] = {
        names[id(param)]: param
        for group, one in zip(optimizer.param_groups, needs, strict=True)
        if one != "elements"
        for param in group["params"]
    }
    made = OwnerUpdate(optimizer, chosen, parts, pieces.group, divides_replicas=pieces.divides_replicas)
    return made if made.spread_names else None


def _needs_of_groups(optimizer: Optimizer, pieces: ModelPieces) -> list[Needs]:
    """What the optimizer needs for each of its groups; the same on every rank."""
    known = known_needs(optimizer)
    if known is not None:
        return [known] * len(optimizer.param_groups)
    mine = [
        tried_needs(optimizer, number, pieces.forms, has_all_params=pieces.has_all_params)
        for number in range(len(optimizer.param_groups))
    ]
    everyone = all_gather_object(mine)
    worst = [max(found, key=_SEVERITY.__getitem__) for found in zip(*everyone, strict=True)]
    if None in worst and dist.get_rank() == 0:
        _log.warning(
            "%s could not be tried on small tensors: it is given whole ones. If it updates each element by itself, set"
            ' %s = "elements" on it, which is faster',
            type(optimizer).__name__,
            DECLARATION,
        )
    return [one or "tensors" for one in worst]
