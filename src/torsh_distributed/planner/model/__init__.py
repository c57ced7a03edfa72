"""What a model does in a step, counted without memory: `profiling` makes a `model_profile` by an `operation_trace`."""
