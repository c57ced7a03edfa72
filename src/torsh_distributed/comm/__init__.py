"""Moving bytes between ranks: `groups` and `collectives` are what users call, `backends` what carries it out."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
