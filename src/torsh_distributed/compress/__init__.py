"""Gradients in fewer bytes: `codecs`, the `feedback` that makes up for their errors, and `averaging` over ranks."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
