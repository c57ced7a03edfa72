"""State of model and optimizer as whole tensors by parameter name: `whole_state`; `split_state` for split models."""
