"""Ranks of one node that share a GPU exchange tensors in its memory.

Read `gpu_wire` (the collectives), then `gpu_memory` (one rank's memory in the other processes) and `cuda_driver`.
"""
