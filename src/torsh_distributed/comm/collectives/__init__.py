"""What users call, `reductions` and `moves` first, then `point_to_point`, `objects`, `packed` and `spread`.

`call` is how each reaches its backend, `work` the handle it returns, `matching` the comparison of ranks for debugging.
"""
