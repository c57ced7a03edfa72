"""Choosing a plan before the job runs: a `model` on a `machine`, its `memory`, the `search`.

Read `model/model_profile.py`, `memory/rank_memory.py`, then `search/ranking.py`. Every number is counted on tensors
without memory, or computed from numbers shown beside it; nothing here starts a rank.
"""
