"""DeepSpeed without DeepSpeed: its configs, its schedules and its checkpoints.

`config` reads a DeepSpeed file key by key; `schedules` are its learning rates; `checkpoints` reads what it saved.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
