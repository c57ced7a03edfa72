"""The optimizer over offloaded state."""
