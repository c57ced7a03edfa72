"""Stages of models that cannot be traced, such as those of transformers: each runs the model's own forward.

Read `layer_chain` (what runs when in a forward), then `stage_clone`.
"""
