"""Axes of the mesh put together: tensor, pipeline and context beside replicas and shards."""

from torsh_distributed.parallel.composed.build import composed_strategy
from torsh_distributed.parallel.composed.mesh_strategy import Composed
from torsh_distributed.parallel.composed.pipelined import PipelineStages

__all__ = ["Composed", "PipelineStages", "composed_strategy"]
