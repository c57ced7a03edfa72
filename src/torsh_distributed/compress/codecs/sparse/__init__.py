"""Codecs that send some of the elements, chosen by `magnitude` or by `random_choice`. Read `base` first."""
