"""Seeing a job: metrics of ranks, exports, pages. All of it is fed by events; training never waits for it.

`metrics` is what a rank measures, `job` the whole of it beside the launcher, `export` and `page` where it goes,
`serving` the process that does it. The names are in `__init__.pyi`.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
