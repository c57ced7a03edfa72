"""Backends of ours: c10d process groups over shared memory."""

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.registry import register_backends
from torsh_distributed.comm.backends.shm import ShmOptions
from torsh_distributed.comm.backends.wire import Call, Wire

__all__ = ["Call", "ShmOptions", "TorshProcessGroup", "Wire", "register_backends"]
