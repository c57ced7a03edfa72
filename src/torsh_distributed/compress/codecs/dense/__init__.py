"""Codecs that send something for every element: `base` first, then one file each."""
