"""Stores: the key-value services through which ranks meet. `open_store("tcp://host:port")` makes one."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
