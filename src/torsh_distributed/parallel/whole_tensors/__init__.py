"""Optimizers that look at whole tensors, over parameters that are spread in pieces.

`model_pieces` decides which parameters an optimizer gets whole, by `optimizer_needs`; `owner_update` runs the update on
one rank for each, and saves and loads the state that is kept there.
"""
