"""Questions about a model: which modules belong together, is it the same on all ranks, how it gets its weights."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
