"""Training: spread a model over the world with `parallelize`, run its steps with the `Engine`."""

from torsh_distributed.train.assemble import parallelize
from torsh_distributed.train.engine import Engine

__all__ = ["Engine", "parallelize"]
