"""Elastic averaging SGD: workers train independently and are pulled towards a common centre at intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc.parameters import Consistency
from torsh_distributed.rpc.rpc_worker import RpcWorker
from torsh_distributed.train.optimizers.served_parameters import Params, ServedParameters, named, num_ranks


def checked_alpha(alpha: float | None, period: int, num_workers: int) -> float:
    """How far a worker moves towards the centre; InvalidArgument if they would diverge."""
    found = 0.9 / num_workers if alpha is None else alpha
    if not 0 < found * num_workers < 2 or period < 1:
        raise InvalidArgument(
            "alpha × workers must be above 0 and below 2, and period at least 1",
            hint="0.9 / workers is a usual alpha",
            alpha=found,
            num_workers=num_workers,
            period=period,
        )
    return found


class ElasticCenter:
    """The centre c of what workers train, on parameter servers. A worker and the centre meet every `period` steps.

    With x the parameters of a worker: d = alpha·(x - c), x ← x - d, c ← c + d. Under "bsp" all workers meet at once, as
    in c ← c + sum of d; under "async" each one when it is due, and nobody waits.
    """

    def __init__(
        self,
        served: ServedParameters,
        optimizer: Optimizer,
        *,
        alpha: float | None,
        period: int,
        consistency: Literal["bsp", "async"],
    ) -> None:
        """`optimizer` takes this worker's own steps."""
        self.alpha = checked_alpha(alpha, period, served.num_workers)
        self.period = period
        # With bsp the server takes the mean of what arrives: the sum over all workers is so many times that.
        self._share = self.alpha * (served.num_workers if consistency == "bsp" else 1)
        self.num_steps = 0
        self._served = served
        self._optimizer = optimizer
        self._is_finished = False
        self.has_common_state = False
        served.create(Consistency(kind=consistency, num_workers=served.num_workers), "SGD", lr=1.0)

    @torch.no_grad()
    def after_step(self) -> None:
        """A step of this worker's own was taken; every `period`-th one meets the centre."""
        self.num_steps += 1
        if self.num_steps % self.period:
            return
        center = self._served.client.pull(list(self._served.params))
        apart = {name: param - center[name].to(param.device) for name, param in self._served.params.items()}
        for name, param in self._served.params.items():
            param.sub_(apart[name], alpha=self.alpha)
        self._served.client.push({name: value.mul_(-self._share) for name, value in apart.items()})

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, every rank's parameters are the centre; every rank of a process group calls this."""
        params = self._served.params
        self._served.meet()
        own = {name: param.detach().clone() for name, param in params.items()}
        self._served.take()
        self._served.meet()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, param in params.items():
                    param.copy_(own[name])

    def spread(self) -> None:
        """The parameters of the first rank become the centre, and those of all; every rank calls this."""
        self._served.meet()
        if self._served.is_first:
            self._served.client.restore({name: one.detach().cpu() for name, one in self._served.params.items()}, {})
        self._served.meet()
        self._served.take()

    def finish(self) -> None:
        """Leave, and wait until every worker has; then all have the centre as their parameters."""
        if not self._is_finished:
            self._is_finished = True
            self._served.finish()

    def own_state(self) -> dict[str, Any]:
        """What this rank has beside the centre: parameters, the optimizer's state, the number of steps."""
        return {
            "params": {name: param.detach().clone() for name, param in self._served.params.items()},
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
        }

    @torch.no_grad()
    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from what `own_state` returned, at the same rank."""
        for name, param in self._served.params.items():
            param.copy_(state["params"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]


class ElasticAveragingSGD(SGD):
    """SGD on each worker's own parameters; every `period` steps, worker and centre move towards each other.

    See `ElasticCenter` for the equations; the centre is what to evaluate and save (`at_center`). They are stable for
    alpha·workers < 2; 0.9 / workers is a usual choice. Under "bsp" all workers meet at the same step, with the same
    result in every run; under "async" they come and go as they like. All start from the parameters of the first one.
    `servers`, `num_workers` and `worker` are those of `AsyncSGD`.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *,
        alpha: float | None = None,
        period: int = 4,
        consistency: Literal["bsp", "async"] = "bsp",
        servers: Sequence[str] | None = None,
        num_workers: int | None = None,
        worker: RpcWorker | None = None,
        timeout_s: float = 300.0,
        **sgd: Any,
    ) -> None:
        checked_alpha(alpha, period, num_workers or num_ranks())  # before servers are asked
        by_name = named(params)
        super().__init__(list(by_name.values()), lr=lr, **sgd)
        self._served = ServedParameters(
            by_name.items(), servers=servers, num_workers=num_workers, worker=worker, timeout_s=timeout_s
        )
        self._center = ElasticCenter(self._served, self, alpha=alpha, period=period, consistency=consistency)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """A step of SGD; every `period`-th one meets the centre."""
        loss: float | None = super().step(closure)
        self._center.after_step()
        return loss

    @contextmanager
    def at_center(self) -> Iterator[None]:
        """Inside, the parameters are those of the centre: for evaluation and checkpoints. Every rank calls this."""
        with self._center.together():
            yield

    def finish(self) -> None:
        """Leave, and wait until every worker has; then all have the centre as their parameters."""
        self._center.finish()

    @override
    def state_dict(self) -> dict[str, Any]:
        """SGD's state, the centre, and the number of steps; the parameters belong to this worker."""
        center: dict[str, Tensor] = self._served.client.pull(list(self._served.params))
        copied = {name: value.clone() for name, value in center.items()}
        return {**super().state_dict(), "center": copied, "num_steps": self._center.num_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every rank of a process group calls this; without one, a single worker's centre becomes that of all."""
        rest = dict(state_dict)
        self._center.num_steps = rest.pop("num_steps")
        center = rest.pop("center")
        super().load_state_dict(rest)
        self._served.meet()
        if self._served.is_first:
            self._served.client.restore(center, {})
        self._served.meet()
