"""The collectives users call: `tensors` first, then `point_to_point`, `objects`, `rows`, `packed` and `spread`."""
