"""Asynchronous SGD with bounded staleness: ranks push gradients to the rank that holds the parameters.

A rank waits for others only when it is more than `staleness` updates ahead of the slowest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.point_to_point import recv, send
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.manager import pair_groups
from torsh_distributed.errors import InvalidArgument, OperationTimeout, TorshError

_PUSH, _DONE = 1.0, 0.0


class Center:
    """The parameters that all ranks train, and how many updates each rank has made. Used by several threads."""

    def __init__(
        self, params: list[Tensor], ranks: Iterable[int], *, staleness: int, timeout_s: float, **sgd: Any
    ) -> None:
        self._params = [torch.nn.Parameter(param.detach().clone()) for param in params]
        self.optimizer = SGD(self._params, **sgd)
        self._staleness = staleness
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._clocks: dict[int, float] = dict.fromkeys(ranks, 0)
        self.num_updates = 0
        self.max_lead = 0

    def push(self, rank: int, flat: Tensor) -> Tensor:
        """Apply the gradients of `rank`, wait while it is too far ahead, and return the parameters, flat."""
        with self._changed:
            for param, grad in zip(self._params, _unflat(flat, self._params), strict=True):
                param.grad = grad
            self.optimizer.step()
            self.num_updates += 1
            self._clocks[rank] += 1
            self._changed.notify_all()
            self._wait(lambda: self._lead(rank) <= self._staleness, rank)
            self.max_lead = max(self.max_lead, int(self._lead(rank)))
            return self.flat()

    def leave(self, rank: int) -> None:
        """`rank` makes no further updates: other ranks stop waiting for it."""
        with self._changed:
            self._clocks[rank] = float("inf")
            self._changed.notify_all()

    def wait_for_all(self, rank: int) -> Tensor:
        """The parameters after every rank has left."""
        with self._changed:
            self._wait(lambda: min(self._clocks.values()) == float("inf"), rank)
            return self.flat()

    def flat(self) -> Tensor:
        """The parameters in one buffer."""
        return _flat([param.detach() for param in self._params])

    def _lead(self, rank: int) -> float:
        slowest = min(self._clocks.values())
        return 0 if slowest == float("inf") else self._clocks[rank] - slowest

    def _wait(self, is_ready: Callable[[], bool], rank: int) -> None:
        if not self._changed.wait_for(is_ready, self._timeout_s):
            slowest = min(self._clocks.values())
            raise OperationTimeout(
                f"rank {rank} waited {self._timeout_s:g} s for slower ranks",
                hint="raise staleness or timeout_s, or find out why the missing ranks are slow",
                operation="async_sgd",
                rank=rank,
                missing_ranks=[other for other, clock in self._clocks.items() if clock == slowest],
                staleness=self._staleness,
            )


class AsyncSGD:
    """SGD whose updates are applied as they arrive, to the parameters that rank `server` holds; all ranks train.

    `step()` sends this rank's gradients and receives the current parameters, including the updates of other ranks;
    `finish()`, called by every rank, waits for all and leaves every rank with the same parameters. Ranks may take
    different numbers of steps. A gradient may be computed from parameters that lack up to `staleness` updates of each
    other rank; at 0 a rank starts an update once all have finished the previous one. No wait is longer than
    `timeout_s`. A rank that fails does not stop the others; `finish()` raises its error on the server. Parameters are
    floating-point, of one dtype and device; the server's are copied to all at the start. Every rank of the world
    constructs it.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        staleness: int = 4,
        server: int = 0,
        timeout_s: float = 300.0,
        **sgd: Any,
    ) -> None:
        self._params = [param for param in params if param.requires_grad]
        ranks = range(process_group.world_size())
        self._rank, self._server = process_group.rank(), server
        if staleness < 0 or server not in ranks or len({(p.dtype, p.device) for p in self._params}) != 1:
            raise InvalidArgument(
                "AsyncSGD needs staleness of at least 0, a server in the world, and parameters of one dtype and device",
                staleness=staleness,
                server=server,
                world_size=len(ranks),
                kinds=sorted({f"{param.dtype} on {param.device}" for param in self._params}),
            )
        for param in self._params:
            broadcast(param.detach(), server)
        self._timeout_s = timeout_s
        self._is_finished = False
        self._center: Center | None = None
        self._threads: list[threading.Thread] = []
        self._errors: list[TorshError] = []
        pairs = pair_groups(server)
        if self._rank != server:
            self._pair = pairs[self._rank]
            return
        self._center = Center(self._params, ranks, staleness=staleness, timeout_s=self._timeout_s, lr=lr, **sgd)
        self._threads = [threading.Thread(target=self._serve, args=pair, daemon=True) for pair in pairs.items()]
        for thread in self._threads:
            thread.start()

    @property
    def num_updates(self) -> int:
        """Updates of all ranks so far, known on the server."""
        return self._held().num_updates

    @property
    def max_lead(self) -> int:
        """The most updates that a rank was ahead of the slowest when it continued; known on the server."""
        return self._held().max_lead

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the server's SGD: learning rates are changed there."""
        return self._held().optimizer.param_groups

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for param in self._params:
            param.grad = None

    def step(self) -> None:
        """Send the gradients and take the newest parameters."""
        if self._is_finished:
            raise InvalidArgument("step() after finish(): the server has stopped", hint="make a new AsyncSGD")
        grads = _flat([torch.zeros_like(param) if param.grad is None else param.grad for param in self._params])
        self._take(self._exchange(grads) if self._center is None else self._center.push(self._rank, grads))

    def finish(self) -> None:
        """Wait until every rank has called this; then all hold the same, final parameters."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._center is None:
            self._take(self._exchange(None))
            return
        self._center.leave(self._rank)
        final = self._center.wait_for_all(self._rank)
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._take(final)
        if self._errors:
            raise self._errors[0]

    def state_dict(self) -> dict[str, Any]:
        """The state of the server's SGD; called there."""
        return self._held().optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`, on the server."""
        self._held().optimizer.load_state_dict(dict(state))

    def _held(self) -> Center:
        if self._center is None:
            raise InvalidArgument(
                "only the server knows this", hint=f"ask on rank {self._server}", rank=self._rank, server=self._server
            )
        return self._center

    def _exchange(self, grads: Tensor | None) -> Tensor:
        """Send a message to the server; returns the parameters it answers with."""
        like = self._params[0]
        numel = sum(param.numel() for param in self._params)
        body = like.new_zeros(numel) if grads is None else grads
        message = torch.cat([like.new_full((1,), _DONE if grads is None else _PUSH), body])
        send(message, self._server, group=self._pair, timeout_s=self._timeout_s)
        answer = like.new_empty(numel)
        recv(answer, self._server, group=self._pair, timeout_s=self._timeout_s)
        return answer

    def _serve(self, rank: int, pair: dist.ProcessGroup) -> None:
        """The server's thread for another rank: receive its gradients, answer with parameters, until it is done."""
        center = self._held()
        message = self._params[0].new_empty(1 + sum(param.numel() for param in self._params))
        try:
            while True:
                recv(message, rank, group=pair, timeout_s=self._timeout_s)
                if message[0] == _DONE:
                    center.leave(rank)
                    send(center.wait_for_all(rank), rank, group=pair, timeout_s=self._timeout_s)
                    return
                send(center.push(rank, message[1:].clone()), rank, group=pair, timeout_s=self._timeout_s)
        except TorshError as error:
            self._errors.append(error)
            center.leave(rank)

    @torch.no_grad()
    def _take(self, flat: Tensor) -> None:
        for param, value in zip(self._params, _unflat(flat, self._params), strict=True):
            param.copy_(value)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflat(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    pieces, start = [], 0
    for tensor in like:
        pieces.append(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
    return pieces
