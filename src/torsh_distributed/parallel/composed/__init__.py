"""Axes of the mesh put together: tensor, pipeline and context beside replicas and shards."""

from torsh_distributed.parallel.composed.build import composed_strategy
from torsh_distributed.parallel.composed.pipeline_strategy import PipelineStages
from torsh_distributed.parallel.composed.split_model import Composed

__all__ = ["Composed", "PipelineStages", "composed_strategy"]
