"""Gradients averaged after backward, where some parameters are experts that other ranks do not have."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torsh_distributed.parallel.layout import GRADIENT_AXES, REPLICA_AXES
from torsh_distributed.parallel.mesh import Mesh
from torsh_distributed.parallel.replicas import ReplicatedGradients


class SpreadGradients:
    """Averages gradients over the parts of a batch; those of spread experts over the replicas of each.

    Backward through the exchange has added up what the ranks of `ep` ask of an expert: that sum is divided by their
    number, then averaged over the ranks that hold the same expert.
    """

    def __init__(self, params: Iterable[nn.Parameter], experts: Iterable[nn.Parameter], mesh: Mesh) -> None:
        self._experts = list(experts)
        held = {id(param) for param in self._experts}
        others = [param for param in params if id(param) not in held]
        self._ep = mesh.layout.degree("ep")
        self._averages = (
            ReplicatedGradients(others, mesh.group(*GRADIENT_AXES)),
            ReplicatedGradients(self._experts, mesh.group(*REPLICA_AXES)),
        )

    def average(self) -> None:
        """Average the gradients of a step, once; every rank calls this."""
        for param in self._experts:
            if param.grad is not None:
                param.grad.div_(self._ep)
        for average in self._averages:
            average.average()
            average.forget()
