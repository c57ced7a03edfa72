"""Surviving the loss and the arrival of ranks."""
