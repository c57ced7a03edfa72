"""Rules about losses and statistics over the samples of all ranks."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections


def _recovers_in_place(plan: PlanSections) -> bool:
    return plan.elastic.enabled and plan.elastic.mode == "in_place"


def _divides_in_time(plan: PlanSections) -> bool:
    has_microbatches = plan.mesh.pp > 1 and plan.pipeline.num_microbatches > 1
    return plan.training.gradient_accumulation > 1 or has_microbatches


LOSS_RULES = (
    CompatibilityRule(
        name="gathered-loss-in-passes",
        keys=("training.gather_for_loss", "training.gradient_accumulation"),
        clashes=lambda plan: plan.training.gather_for_loss and plan.training.gradient_accumulation > 1,
        reason="a pass has only some of the samples that are compared with each other",
        way_out="set training.gradient_accumulation = 1, and [activation] to save memory",
    ),
    CompatibilityRule(
        name="gathered-loss-of-parts",
        keys=("training.gather_for_loss", "mesh.pp", "mesh.cp"),
        clashes=lambda plan: plan.training.gather_for_loss and max(plan.mesh.pp, plan.mesh.cp) > 1,
        reason="pipelines and split sequences compute the loss part by part",
        way_out="use mesh.dp, mesh.shard or mesh.tp",
    ),
    CompatibilityRule(
        name="gathered-loss-declared",
        keys=("training.gather_for_loss", "training.loss_is"),
        clashes=lambda plan: plan.training.gather_for_loss and plan.training.loss_is != "auto",
        reason="a loss of the whole batch is not combined from parts",
        way_out="leave training.loss_is out",
    ),
    CompatibilityRule(
        name="shared-statistics-of-parts",
        keys=("training.sync_batch_norm", "training.gradient_accumulation", "mesh.pp", "pipeline.num_microbatches"),
        clashes=lambda plan: plan.training.sync_batch_norm and _divides_in_time(plan),
        reason="each pass and each microbatch would be normalised by itself",
        way_out="set training.gradient_accumulation = 1 and mesh.pp = 1",
    ),
    CompatibilityRule(
        name="shared-statistics-in-changing-world",
        keys=("training.gather_for_loss", "training.sync_batch_norm", "elastic.enabled"),
        clashes=lambda plan: (
            (plan.training.gather_for_loss or plan.training.sync_batch_norm) and _recovers_in_place(plan)
        ),
        reason="the others compute what a lost rank had by themselves, without the samples it was compared with",
        way_out='set elastic.mode = "restart"',
    ),
)
