"""State of model and optimizer as whole tensors by parameter name, whatever the strategy."""
