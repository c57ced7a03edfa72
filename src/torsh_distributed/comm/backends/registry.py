"""The backends of ours by name, and how torch learns of them."""

from __future__ import annotations

import torch.distributed as dist

from torsh_distributed.comm.backends.hierarchical import create_torsh_group
from torsh_distributed.comm.backends.mpi import create_mpi_group, register_mpi_rendezvous
from torsh_distributed.comm.backends.shm import create_shm_group

_CREATORS = {"shm": create_shm_group, "torsh": create_torsh_group, "mpi4py": create_mpi_group}


def register_backends() -> None:
    """Make `init_process_group("shm")` work in a plain torch script. Called once, by importing torsh_distributed."""
    if not dist.is_available():
        return
    for name, create in _CREATORS.items():
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    register_mpi_rendezvous()
