"""The shm backend: shared memory between the ranks of one node.

Read `group` (how one is made), `segment`, `core` and `wire`; `portable*` and `native` are the two cores.
"""

from torsh_distributed.comm.backends.shm.group import ShmOptions, create_shm_group, create_shm_wire

__all__ = ["ShmOptions", "create_shm_group", "create_shm_wire"]
