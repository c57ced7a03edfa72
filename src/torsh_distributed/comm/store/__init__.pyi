from torsh_distributed.comm.store.keyspace import MAX_VALUE_BYTES as MAX_VALUE_BYTES
from torsh_distributed.comm.store.keyspace import Swap as Swap
from torsh_distributed.comm.store.registry import open_store as open_store
from torsh_distributed.comm.store.store import Store as Store
from torsh_distributed.comm.store.store import StoreTimeout as StoreTimeout
from torsh_distributed.comm.store.tcp.tcp_server import TcpStoreServer as TcpStoreServer
