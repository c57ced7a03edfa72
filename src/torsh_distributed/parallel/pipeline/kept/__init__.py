"""Stages that keep the model's own forward: for models that cannot be traced, such as those of transformers.

Read `layer_chain` (what runs when in a forward), then `stage_clone`.
"""
