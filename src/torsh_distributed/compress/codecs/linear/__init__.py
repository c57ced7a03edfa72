"""Codecs whose messages can be summed by an all-reduce: `base` first, then one file each."""
