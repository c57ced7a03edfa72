"""Choosing a plan before the job runs: `model` knows what a model does, `memory` whether it fits.

Read `model/model_profile.py`, then `memory/rank_memory.py`. Every number is counted on tensors without memory, or
computed from numbers shown beside it; nothing here starts a rank.
"""
