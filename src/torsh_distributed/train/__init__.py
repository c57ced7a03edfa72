"""Training: spread a model over the world with `parallelize`, run its steps with the `Engine`."""

from torsh_distributed.train.engine import Engine, parallelize

__all__ = ["Engine", "parallelize"]
