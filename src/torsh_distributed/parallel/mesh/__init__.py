"""The mesh: `layout` is arithmetic, `mesh` owns the groups; `mesh_reduction` reduces over its axes."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
