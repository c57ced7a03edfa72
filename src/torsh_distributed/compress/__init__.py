"""Gradients in fewer bytes. Read `compressor`, then `codecs`, `feedback`, which compensates errors, and `averaging`."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
