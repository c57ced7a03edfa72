"""Questions about a model: which modules belong together, whether ranks hold the same one, how it gets weights."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
