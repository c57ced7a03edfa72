"""Axes of the mesh put together: tensor, pipeline and context beside replicas and shards."""

from torsh_distributed.parallel.composed.build import composed_strategy, is_composed
from torsh_distributed.parallel.composed.pipelined import PipelineStages
from torsh_distributed.parallel.composed.strategy import Composed

__all__ = ["Composed", "PipelineStages", "composed_strategy", "is_composed"]
