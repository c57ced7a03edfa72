"""Pipeline parallelism: stages of layers on ranks, and microbatches that pass through them.

Read `runtime` first, then `stages` (how a model is cut), `schedule` (what runs when) and `timed_stage`.
"""

from torsh_distributed.parallel.pipeline.layer_graph import trace_layers
from torsh_distributed.parallel.pipeline.layer_partition import partition
from torsh_distributed.parallel.pipeline.runtime import PipelineParallel, plan_stages
from torsh_distributed.parallel.pipeline.schedule import Action, Timeline, compute_timeline
from torsh_distributed.parallel.pipeline.schedule_drawing import draw_schedule, schedule_text
from torsh_distributed.parallel.pipeline.stages import Stage, StagePlan, split_into_stages

__all__ = [
    "Action",
    "PipelineParallel",
    "Stage",
    "StagePlan",
    "Timeline",
    "compute_timeline",
    "draw_schedule",
    "partition",
    "plan_stages",
    "schedule_text",
    "split_into_stages",
    "trace_layers",
]
