"""Using the model, during and after training: evaluation with metrics, export, generation."""
