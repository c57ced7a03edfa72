"""The store in which the workers of a job find each other, if a script names none."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from torsh_distributed import known_variables
from torsh_distributed.comm.meeting import rendezvous
from torsh_distributed.errors import ConfigurationError

_CONNECT_S = 5.0


def job_store(timeout_s: float, *, rank: int | None = None) -> dist.Store:
    """The one at MASTER_ADDR:MASTER_PORT, or that of the launcher; rank 0 serves it where nobody else does."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ConfigurationError(
            "this process does not belong to a job, so it does not know where to find other workers",
            hint="start it with `torsh run`, or pass store='tcp://host:port' or a file:// URL",
        )
    has_torch_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = known_variables.text("MASTER_ADDR", os.environ), int(os.environ["MASTER_PORT"])
    is_first = (known_variables.whole_number("RANK") if rank is None else rank) == 0
    return rendezvous.open_store(
        host,
        port,
        is_host=is_first and not has_torch_agent and not _group_serves(host, port),
        timeout_s=timeout_s,
        has_torch_agent=has_torch_agent,
    )


def _group_serves(host: str, port: int) -> bool:
    """Whether this process has a process group, for which rank 0 serves the job's store already."""
    if not dist.is_initialized():
        return False
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError:  # the group met elsewhere
        return False
    return True
