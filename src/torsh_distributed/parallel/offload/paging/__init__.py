"""Parameters that visit the device: units, the pager, its hooks, and the gradients on their way out."""
