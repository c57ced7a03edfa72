"""Gradient codecs and the collectives that carry their payloads."""
