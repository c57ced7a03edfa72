"""Axes of the mesh put together: tensor, pipeline and context beside replicas and shards."""

from torsh_distributed.parallel.composed.build import composed_strategy, is_composed
from torsh_distributed.parallel.composed.strategy import Composed, PipelineStages

__all__ = ["Composed", "PipelineStages", "composed_strategy", "is_composed"]
