"""Combines the axes of the mesh: tensor, pipeline and context with replicas and shards.

Read `build`, then `split_model` and `pipeline_strategy`.
"""

from torsh_distributed.parallel.composed.build import composed_strategy
from torsh_distributed.parallel.composed.pipeline_strategy import PipelineStages
from torsh_distributed.parallel.composed.split_model import Composed

__all__ = ["Composed", "PipelineStages", "composed_strategy"]
