"""Data parallelism: `ddp` wraps a model, `gradient_sync` averages gradients, `data_strategy` serves the Engine."""
