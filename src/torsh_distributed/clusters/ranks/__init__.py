"""Ranks that an engine starts itself, without our launcher: how they begin, and how they say why they failed."""
