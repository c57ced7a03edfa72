"""Codecs whose messages an all-reduce can sum. Read `base`, then one file for each codec."""
