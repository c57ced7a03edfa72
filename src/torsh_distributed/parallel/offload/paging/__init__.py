"""Fetches parameters to the device and evicts them: `units`, `pager`, `module_state`, then gradients on the way out."""
