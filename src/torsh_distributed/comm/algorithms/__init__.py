"""Ways for an all-reduce to travel, each written on point-to-point messages of any group.

`base.py` says what an algorithm is, `registry.py` knows them by name, `choice.py` picks one by measurement and
`compose.py` runs one. One file each: `ring`, `double_buffered`, `tree`, `doubling`, `reduce_scatter_all_gather`,
`pipelined`, `hierarchical`. Several tensors at once: `packed`. Beside all-reduce: `spread`.
"""
