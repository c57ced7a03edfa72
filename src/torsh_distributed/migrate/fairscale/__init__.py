"""FairScale's classes on ours: `optim` (OSS, AdaScale, the scaler), `nn` (the wrappers), `pipe`; and its configs.

Under the names `fairscale`, `fairscale.nn` and so on: `fairscale_modules`. `fairscale_config` makes plans of dicts.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
