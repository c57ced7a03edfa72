"""Our backends as c10d process groups.

Read `wire` (what each backend implements), `lifecycle`, `short_path` and `base` (what they share), then `shm`,
`hierarchical` and `mpi`.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
