"""Stores: the key-value services through which ranks meet. `open_store("tcp://host:port")` opens one.

Read `store` (what users hold), `keyspace` (the interface below), then `table` and the keyspaces.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
