"""Ready training jobs for `torsh demo NAME`: `registry` has them by name, `base` how they train."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
