"""A process that reads parameters as they are published, and never writes: evaluation, generation, serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torsh_distributed.rpc.parameters.server_links import ServerLinks
from torsh_distributed.rpc.rpc_worker import RpcWorker


class Publication(NamedTuple):
    """Parameters that no later push changes."""

    number: int
    versions: dict[str, int]
    """Of each server's part when it was published."""
    tensors: dict[str, Tensor]


class ParameterFollower:
    """Takes publications, each server's part of the same one. One thread at a time."""

    def __init__(self, servers: Sequence[str], *, worker: RpcWorker | None = None, timeout_s: float = 300.0) -> None:
        self._links = ServerLinks(servers, worker, timeout_s)
        self.number = 0
        """Of the newest publication that was taken."""

    def next(self) -> Publication:
        """Wait for a publication that was not taken yet: the newest, or the one before it."""
        after = self.number
        while True:
            parts = self._links.call_all("follow", after)
            numbers = {part["publication"] for part in parts.values()}
            if len(numbers) == 1:
                break
            # The publisher was between two servers. Each keeps two, so the newer of these is, or will be, on all.
            after = max(numbers) - 1
        self.number = numbers.pop()
        tensors = {name: tensor for part in parts.values() for name, tensor in part["tensors"].items()}
        return Publication(self.number, {server: part["version"] for server, part in parts.items()}, tensors)

    def next_into(self, module: nn.Module) -> Publication:
        """The same, copied to a module's parameters of the same names."""
        found = self.next()
        with torch.no_grad():
            for name, param in module.named_parameters():
                if name in found.tensors:
                    param.copy_(found.tensors[name])
        return found
