"""Horovod for PyTorch, without its C++: `import torsh_distributed.migrate.horovod as hvd`.

Operations are matched by name in `negotiation`; `collectives` and `training` are what scripts call; `basics` and
`process_sets` come first. Under the names `horovod` and `horovod.torch`: `horovod_modules`.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
