"""`deepspeed.init_distributed`: the process group of a script."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist

from torsh_distributed import known_variables
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.launch.worker.init import init, init_process_group
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require


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
    require(
        dist_init_required is not False,
        "Distributed backend is not initialized. Please set dist_init_required to True or initialize before calling"
        " deepspeed.initialize()",
        hint="call torch.distributed.init_process_group first, or leave dist_init_required out",
    )
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    limit_s = timeout.total_seconds() if timeout is not None else float(minutes) * 60 if minutes else None
    if init_method is not None and init_method != "env://":
        _meet_at(init_method, rank, world_size, limit_s or 300.0)
        return
    # The backend that scripts name is the fastest DeepSpeed has for the device; ours is chosen for it as well.
    init(timeout_s=limit_s)


def _meet_at(init_method: str, rank: int, world_size: int, limit_s: float) -> None:
    """Meet at `tcp://HOST:PORT` or in `file:///PATH`; `?rank=…&world_size=…` there wins over the launcher's values."""
    parts = urlsplit(init_method)
    in_url = {name: int(values[0]) for name, values in parse_qs(parts.query).items() if values[0].isdigit()}
    place = in_url.get("rank", rank if rank >= 0 else known_variables.whole_number("RANK"))
    total = in_url.get("world_size", world_size if world_size > 0 else known_variables.whole_number("WORLD_SIZE"))
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        init_process_group("auto", place, total, parts.hostname, parts.port, limit_s)
    elif parts.scheme == "file" and parts.path:
        init_process_group("auto", place, total, timeout=limit_s, store=dist.FileStore(parts.path, total))
    else:
        raise ConfigurationError(
            "init_method is env://, tcp://HOST:PORT or file:///PATH, a path that all ranks see", got=init_method
        )


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
