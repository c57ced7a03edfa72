"""Rules that stand up to hostile clients: the interface in `base`, rules `by_coordinate` and `by_distance`, their names
in `registry`."""
