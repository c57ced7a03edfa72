"""The shm backend: ranks of one node, through memory they share."""

from torsh_distributed.comm.backends.shm.group import ShmOptions, create_shm_group, create_shm_wire

__all__ = ["ShmOptions", "create_shm_group", "create_shm_wire"]
