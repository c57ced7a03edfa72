"""Optimizers on host memory: `cpu_adam`, and `divided_update` for replicas of one node."""
