"""Sums the gradients of parameters that stages on several ranks share, such as a head tied to the embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.pipeline.stages import StagePlan


class TiedGradients:
    """Sums gradients of shared parameters over the ranks that hold a copy, once a step.

    Copies stay equal: they start equal and get the same gradients and updates. If one rank holds all uses (a V-shaped
    schedule), the parameter is one tensor and nothing is sent.
    """

    def __init__(
        self,
        plan: StagePlan,
        stage_of: Mapping[int, int],
        built: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
    ) -> None:
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.copies: dict[str, int] = {}
        """Name of a shared parameter on this rank to the number of ranks that hold a copy."""
        self.names: dict[str, str] = {}
        """Every name of a shared parameter to the name of its first use."""
        self.names_here: dict[str, str] = {}
        """Every name of a shared parameter that this rank has a copy of, to its name here."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for uses in plan.tied:
            ranks = tuple(sorted({stage_of[stage] for stage, _ in uses}))
            self.names.update({name: uses[0][1] for _, name in uses})
            here = next((name for stage, name in uses if stage in built), None)
            if here is not None:
                self.names_here.update({name: here for _, name in uses})
            if len(ranks) == 1 or group.rank() not in ranks:
                continue
            if ranks not in made:
                made[ranks] = _subgroup(group, ranks)
            stage, name = next((stage, name) for stage, name in uses if stage in built)
            param = built[stage].get_parameter(name)
            self._shared.append((param, made[ranks]))
            self.copies.update({name: len(ranks) for stage, name in uses if stage in built})
            # Copies start with the first holder's values.
            held = _held(param.data)
            if held.numel():
                dist.broadcast(held, group=made[ranks], group_src=0)

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the gradients; every rank that holds a copy calls this."""
        for param, group in self._shared:
            grad: Tensor = torch.zeros_like(param) if param.grad is None else param.grad
            held = _held(grad)
            if held.numel():
                all_reduce(held, group=group)
            param.grad = grad


def _held(tensor: Tensor) -> Tensor:
    """This rank's part of it: copies are sharded equally, so the holders of one shard communicate."""
    return local_of(tensor)


def _subgroup(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group over some ranks of `group`; those ranks call this."""
    if len(ranks) == group.size():
        return group
    return group_over([dist.get_global_rank(group, rank) for rank in ranks])
