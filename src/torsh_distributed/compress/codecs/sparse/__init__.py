"""Codecs that send some elements with their positions: `base` and `drawn` first, then one file each."""
