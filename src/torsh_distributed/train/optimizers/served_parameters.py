"""Parameters of this process that servers hold for all workers: under which names, on which servers, and how they meet.

Workers are processes of a job with a process group, or any that name the servers: then no group is needed, and they may
come and go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import barrier, broadcast
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc.current_worker import current_worker, is_started
from torsh_distributed.rpc.parameters import Consistency, ParameterClient, ParameterServer
from torsh_distributed.rpc.rpc_worker import RpcWorker

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""`model.parameters()`, or better `model.named_parameters()`: servers know parameters by name."""
_numbers = itertools.count()
"""Every rank makes the same ones in the same order."""


def named(params: Params) -> dict[str, Tensor]:
    """What is trained, by name; without names by number."""
    found: dict[str, Tensor] = {}
    for number, one in enumerate(params):
        name, param = one if isinstance(one, tuple) else (str(number), one)
        if param.requires_grad:
            found[name] = param
    if not found:
        raise InvalidArgument("there is no parameter to train", hint="pass model.named_parameters()")
    return found


def num_ranks() -> int:
    """Of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


class ServedParameters:
    """A worker's parameters and the client of their servers. One thread at a time.

    Without `servers` rank 0 of the process group serves, in its own process: every rank makes this object.
    """

    def __init__(
        self,
        params: Params,
        *,
        servers: Sequence[str] | None = None,
        num_workers: int | None = None,
        worker: RpcWorker | None = None,
        push_codec: str | None = None,
        pull_codec: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.params = named(params)
        self.is_in_group = dist.is_initialized()
        self.num_workers = num_workers or num_ranks()
        self._timeout_s = timeout_s
        self._server: ParameterServer | None = None
        self._own_worker: RpcWorker | None = None
        if worker is None and not is_started():
            self._own_worker = worker = _worker_of_rank()
        chosen = current_worker() if worker is None else worker
        names = servers if servers is not None else [self._serve(chosen)]
        self.client = ParameterClient(
            names, worker=chosen, push_codec=push_codec, pull_codec=pull_codec, timeout_s=timeout_s
        )

    def _serve(self, worker: RpcWorker) -> str:
        if not self.is_in_group:
            raise InvalidArgument(
                "a process without a process group has to name the servers",
                hint="servers=['ps0'], of `torsh ps serve --name ps0`",
            )
        name = f"parameters {next(_numbers)}"
        if dist.get_rank() == 0:
            self._server = ParameterServer(name, store=worker.directory.store)
        return name

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return not self.is_in_group or dist.get_rank() == 0

    def meet(self) -> None:
        """Every rank of the process group is here; without one nobody is waited for."""
        if self.is_in_group:
            barrier(timeout_s=self._timeout_s)

    def create(self, consistency: Consistency, optimizer: str, **options: Any) -> None:
        """Put the parameters on the servers, or take those that are there; this process has them now.

        The values of the first worker that is here count: of ranks, those of rank 0.
        """
        if self.is_in_group:
            for param in self.params.values():
                broadcast(param.detach(), 0)
        self.client.create(self.params, optimizer=optimizer, consistency=consistency, **options)
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Copy the newest parameters to this process."""
        for name, value in self.client.pull(list(self.params)).items():
            self.params[name].copy_(value)

    def finish(self) -> None:
        """Wait until every worker has left. All take what there is then, and a server of this process ends."""
        self.client.wait_for_end()
        self.take()
        self.meet()
        self.close()

    def close(self) -> None:
        """Leave. Others go on, unless this process serves them."""
        self.client.close()
        if self._server is not None:
            self._server.close()
        if self._own_worker is not None:
            self._own_worker.close()


def _worker_of_rank() -> RpcWorker:
    if not dist.is_initialized():
        raise InvalidArgument(
            "this process takes and makes no calls yet", hint="call rpc.start(name) first, or start the process group"
        )
    return RpcWorker(f"rank {dist.get_rank()} {next(_numbers)}", process_group.store())
