"""Means over ranks through a codec. Read `named_mean`, then the exchanges below it; `damage` is how all ranks raise."""
