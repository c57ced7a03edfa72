from torsh_distributed.comm.backends.base import TorshProcessGroup as TorshProcessGroup
from torsh_distributed.comm.backends.registry import announce_backends as announce_backends
from torsh_distributed.comm.backends.shm.group import ShmOptions as ShmOptions
from torsh_distributed.comm.backends.wire import Call as Call
from torsh_distributed.comm.backends.wire import Wire as Wire
