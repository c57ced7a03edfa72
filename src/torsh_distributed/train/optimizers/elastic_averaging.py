"""Elastic averaging SGD: ranks train independently and are pulled towards a common centre at intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import InvalidArgument


class ElasticAveragingSGD(SGD):
    """SGD on each rank's own parameters; every `period` steps, rank and centre move towards each other.

    With x the parameters of a rank and c the centre: d = alpha·(x - c), x ← x - d, c ← c + sum of d over the ranks. The
    centre is what to evaluate and save (`at_center`). It is stable for alpha·ranks < 2; 0.9 / ranks is a usual choice.
    Communication is one sum of the model's size every `period` steps. All ranks start from the parameters of rank 0.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        alpha: float | None = None,
        period: int = 4,
        group: dist.ProcessGroup | None = None,
        **sgd: Any,
    ) -> None:
        super().__init__(params, lr=lr, **sgd)
        self._group = resolve_group(group)
        size = self._group.size()
        self.alpha = 0.9 / size if alpha is None else alpha
        self.period = period
        if not 0 < self.alpha * size < 2 or period < 1:
            raise InvalidArgument(
                "alpha × ranks must be above 0 and below 2, and period at least 1",
                hint="0.9 / ranks is a usual alpha",
                alpha=self.alpha,
                num_ranks=size,
                period=period,
            )
        for param in self._params():
            broadcast(param.detach(), dist.get_global_rank(self._group, 0), group=self._group)
            self.state[param]["center"] = param.detach().clone()
        self._num_steps = 0

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """A step of SGD; every `period`-th one averages over all ranks of the group."""
        loss: float | None = super().step(closure)
        self._num_steps += 1
        if self._num_steps % self.period == 0:
            self._pull_together()
        return loss

    @contextmanager
    def at_center(self) -> Iterator[None]:
        """Inside, the parameters are those of the centre, equal on every rank: for evaluation and checkpoints."""
        own = [param.detach().clone() for param in self._params()]
        with torch.no_grad():
            for param in self._params():
                param.copy_(self.state[param]["center"])
        try:
            yield
        finally:
            with torch.no_grad():
                for param, value in zip(self._params(), own, strict=True):
                    param.copy_(value)

    @override
    def state_dict(self) -> dict[str, Any]:
        """SGD's state, the centre, and the number of steps; the parameters belong to this rank."""
        return {**super().state_dict(), "num_steps": self._num_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self._num_steps = rest.pop("num_steps")
        super().load_state_dict(rest)

    @torch.no_grad()
    def _pull_together(self) -> None:
        params = list(self._params())
        centers = [self.state[param]["center"] for param in params]
        pulls = [(param - center).mul_(self.alpha) for param, center in zip(params, centers, strict=True)]
        for param, pull in zip(params, pulls, strict=True):
            param.sub_(pull)
        works = [all_reduce(pull, group=self._group, async_op=True) for pull in pulls]
        for center, work in zip(centers, works, strict=True):
            center.add_(work.wait())

    def _params(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]
