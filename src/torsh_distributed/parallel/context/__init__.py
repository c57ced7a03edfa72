"""Context parallelism: sequences split over ranks, attention in a ring.

Read `context_parallel` first, then `positions` (which a rank has) and `attention_ring`.
"""

from torsh_distributed.parallel.context.attention_ring import ring_attention
from torsh_distributed.parallel.context.context_parallel import ContextParallel
from torsh_distributed.parallel.context.positions import chunks_of

__all__ = ["ContextParallel", "chunks_of", "ring_attention"]
