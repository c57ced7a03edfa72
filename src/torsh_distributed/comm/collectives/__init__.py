"""What users call, `reductions` and `moves` first, then `point_to_point`, `objects` and `packed`.

`call` is how each reaches its backend and how ranks are compared for debugging, `work` the handle it returns.
"""
