"""Optimizers for host memory: `cpu_adam`, and `divided_update` for replicas on one node."""
