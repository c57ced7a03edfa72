"""Training: parallelize a model, run its steps."""
