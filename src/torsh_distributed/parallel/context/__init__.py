"""Context parallelism: sequences split over ranks, attention by a ring."""

from torsh_distributed.parallel.context.order import chunks_of
from torsh_distributed.parallel.context.parallel import ContextParallel
from torsh_distributed.parallel.context.ring import ring_attention

__all__ = ["ContextParallel", "chunks_of", "ring_attention"]
