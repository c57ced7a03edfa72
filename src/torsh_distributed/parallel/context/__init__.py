"""Context parallelism: sequences split over ranks, attention by a ring."""

from torsh_distributed.parallel.context.context_parallel import ContextParallel
from torsh_distributed.parallel.context.order import chunks_of
from torsh_distributed.parallel.context.ring_attention import ring_attention

__all__ = ["ContextParallel", "chunks_of", "ring_attention"]
