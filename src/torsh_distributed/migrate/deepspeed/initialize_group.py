"""`deepspeed.init_distributed`: the process group of a script."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.launch.worker.init import init, init_process_group


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Bring up the process group, unless there is one: as `torsh_distributed.init()` does, under any launcher."""
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigurationError(
            "dist_init_required is false, but torch.distributed is not initialized",
            hint="call torch.distributed.init_process_group first, or leave the argument out",
        )
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    limit_s = timeout.total_seconds() if timeout is not None else float(minutes) * 60 if minutes else None
    if init_method is not None and init_method != "env://":
        address, _, port = init_method.removeprefix("tcp://").rpartition(":")
        init_process_group("auto", rank, world_size, address, int(port), limit_s or 300.0)
        return
    # The backend that scripts name is the fastest DeepSpeed has for the device; ours is chosen for it as well.
    init(timeout_s=limit_s)


def ensure_group() -> None:
    """Bring up the process group, unless there is one."""
    init_distributed()


def local_rank() -> int:
    """This rank on its node: as the launcher says, for a script may have brought up the group by itself."""
    told = os.environ.get("LOCAL_RANK")
    return int(told) if told is not None else process_group.local_rank()


def rank_device() -> torch.device:
    """The device of this rank: its own GPU where there is one, else the CPU."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
