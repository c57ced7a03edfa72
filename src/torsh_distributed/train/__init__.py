"""Training: spread a model over the world with `parallelize`, run its steps with the `Engine`."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
