"""What a model is for, during and after training: evaluation with metrics, export, generation."""
