"""Codecs that send some of the elements. Read `base` and `drawn`, then one file for each codec."""
