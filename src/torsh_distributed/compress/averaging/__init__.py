"""Means of named gradients over ranks: `named_mean` through a codec, `background` while backward computes."""
