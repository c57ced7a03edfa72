"""Dask: a rank on every worker of a cluster, with the partitions that the worker holds as its data.

Read `run_on_dask` (a function on workers), then `worker_pool` (how workers host ranks) and `rank_data` (partitions to
ranks); `dask_engine` submits scripts, `searching` tries hyper-parameters.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
