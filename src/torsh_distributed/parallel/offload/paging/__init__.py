"""Fetches parameters to the device and evicts them: `units`, `pager`, `hooks`, then the gradients on their way out."""
