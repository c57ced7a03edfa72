"""Stores: the key-value services through which ranks meet. `open_store("tcp://host:port")` makes one."""

from torsh_distributed.comm.store.keyspace import MAX_VALUE_BYTES, Swap
from torsh_distributed.comm.store.registry import open_store
from torsh_distributed.comm.store.store import Store, StoreTimeout
from torsh_distributed.comm.store.tcp_server import TcpStoreServer

__all__ = ["MAX_VALUE_BYTES", "Store", "StoreTimeout", "Swap", "TcpStoreServer", "open_store"]
