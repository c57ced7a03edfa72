"""Ways for an all-reduce to travel, each written on point-to-point messages of any group.

Read `base` (what an algorithm is and the messages it uses), then `ring`, `tree`, `reduce_scatter_all_gather`,
`pipelined` and `hierarchical`. `registry` knows them by name, `auto_choice` picks one
by measurement, `execution` runs one on a group.
"""
