"""Means over ranks through a codec: `named_mean` first, then the exchanges it is built on."""
