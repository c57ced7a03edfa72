"""Processes that serve others: `torsh store`, `torsh ps`."""
