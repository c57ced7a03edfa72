"""Ranks that an engine starts itself, without a launcher of ours: how they begin, and how they say why they failed."""
