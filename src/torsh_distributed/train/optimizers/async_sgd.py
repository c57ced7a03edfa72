"""Asynchronous SGD with bounded staleness: workers push gradients to parameter servers, whose optimizer applies them.

A worker waits for others only when it is more than `staleness` updates ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc.parameters import Consistency, ServerStats
from torsh_distributed.rpc.rpc_worker import RpcWorker
from torsh_distributed.train.optimizers.served_parameters import Params, ServedParameters


class AsyncSGD(Optimizer):
    """SGD, or another optimizer of torch, whose updates servers apply as gradients arrive.

    `step()` sends this worker's gradients and receives the newest parameters, with the updates of other workers. A
    gradient may be computed from parameters that lack up to `staleness` updates of each other worker; with None workers
    never wait. Workers may take different numbers of steps. One that is killed is waited for as long as the server says
    (`lost_after_s`), and one that joins takes what is there. `finish()` waits until all workers have left, and leaves
    every one with the same parameters.

    `servers` are names of servers (`torsh ps serve`) that `rpc` finds; without them rank 0 of the process group serves
    in its own process, and every rank constructs this. No step is taken before `num_workers` have joined, by default
    all ranks. `options` are those of the optimizer. Codecs are those of `ParameterClient`.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *,
        staleness: int | None = 4,
        optimizer: str = "SGD",
        servers: Sequence[str] | None = None,
        num_workers: int | None = None,
        worker: RpcWorker | None = None,
        push_codec: str | None = None,
        pull_codec: str | None = None,
        timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        if staleness is not None and staleness < 0:
            raise InvalidArgument("staleness is a number of updates from 0, or None for no limit", staleness=staleness)
        self._served: ServedParameters | None = None
        found = ServedParameters(
            params,
            servers=servers,
            num_workers=num_workers,
            worker=worker,
            push_codec=push_codec,
            pull_codec=pull_codec,
            timeout_s=timeout_s,
        )
        super().__init__(list(found.params.values()), {"lr": lr, **options})
        kind = Consistency(kind="async", num_workers=found.num_workers)
        if staleness is not None:
            kind = Consistency(kind="bounded", staleness=staleness, num_workers=found.num_workers)
        try:
            found.create(kind, optimizer, lr=lr, **options)
        except BaseException:
            found.close()
            raise
        self._served = found
        self._is_finished = False
        self._sent = self._options()
        self.sets_options = True
        """Whether this worker's learning rate is that of all: in a job of ranks, one says so."""
        self.has_common_state = True

    def _open(self) -> ServedParameters:
        if self._served is None or self._is_finished:
            raise InvalidArgument("this optimizer has finished: it left the servers", hint="make a new AsyncSGD")
        return self._served

    def _options(self) -> dict[str, Any]:
        return {name: value for name, value in self.param_groups[0].items() if name in self.defaults}

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise InvalidArgument(
                "servers have one group of parameters", hint="give all parameters to AsyncSGD at once"
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Push the gradients and take the newest parameters. InvalidArgument if this worker was given up meanwhile."""
        served = self._open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options = self._options()
        if self.sets_options and options != self._sent:
            served.client.set_options(**options)
            self._sent = options
        served.client.push({name: param.grad for name, param in served.params.items() if param.grad is not None})
        served.take()
        return loss

    def stats(self) -> dict[str, ServerStats]:
        """What each server has done: updates, staleness, bytes."""
        return self._open().client.stats()

    def rejoin(self) -> None:
        """After a step that failed: join again and take what is there; that step's gradient is in it, or dropped."""
        served = self._open()
        served.client.join()
        served.take()

    def finish(self) -> None:
        """Leave, and wait until every worker has; then all have the same, final parameters."""
        if not self._is_finished:
            self._open().finish()
            self._is_finished = True

    def close(self) -> None:
        """Leave without waiting for others; they go on, unless this process serves them."""
        if self._served is not None and not self._is_finished:
            self._is_finished = True
            self._served.close()

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state of the servers' optimizer, as torch has it."""
        self._take_state()
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()` and this worker's parameters: they become those of all.

        Every rank of a process group calls this, with the same; without one a single worker does, while none steps.
        """
        super().load_state_dict(state_dict)
        self.spread()

    def _take_state(self) -> None:
        served = self._open()
        found = served.client.optimizer_state()
        for name, param in served.params.items():
            self.state.pop(param, None)
            if found.get(name):
                self.state[param] = {key: _like(value, param) for key, value in found[name].items()}

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, every rank has the same parameters, the newest, and the optimizer's state; every rank calls this."""
        served = self._open()
        served.meet()
        served.take()
        self._take_state()
        served.meet()
        yield

    def spread(self) -> None:
        """Parameters and state that this rank has loaded become those of all; every rank calls this."""
        served = self._open()
        served.meet()
        if served.is_first:
            values = {name: param.detach().cpu() for name, param in served.params.items()}
            served.client.set_options(**self._options())
            served.client.restore(
                values, {name: _on_cpu(self.state.get(one, {})) for name, one in served.params.items()}
            )
        self._sent = self._options()
        served.meet()
        served.take()

    def own_state(self) -> dict[str, Any]:
        """What this rank alone has: nothing."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Nothing to take."""


def _like(value: Any, param: Tensor) -> Any:
    """Where torch keeps it: with the parameter, or on the host if it is a count of steps."""
    return value.to(param.device) if isinstance(value, Tensor) and value.shape == param.shape else value


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
