"""Our backends as c10d process groups: `base` is what they share, `wire` what each must do."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
