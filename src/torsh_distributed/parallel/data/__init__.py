"""Data parallelism: `ddp` wraps a model, `gradient_sync` averages gradients, `data_strategy` serves the Engine."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
