"""Coming over from other libraries: their modules under their names, their command lines, their configs.

`stand_in` puts our module in place of theirs; `horovod` is the first.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
