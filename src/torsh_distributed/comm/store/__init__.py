"""Stores: the key-value services through which ranks meet."""
