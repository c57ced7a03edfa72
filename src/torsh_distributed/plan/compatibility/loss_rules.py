"""Rules about losses and statistics over the samples of all ranks.

Rules about the batch: every pass of every rank, and every microbatch of it, needs samples.
They apply where the plan says how large a batch is; otherwise the loader decides.
"""

from __future__ import annotations

from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import DEFAULTS, PlanSections


def _num_passes(plan: PlanSections) -> int:
    """Passes of all ranks together in one step; 0 where the batch or the mesh is not known."""
    # At its default the size asks for nothing: a saved plan writes it too, and must be judged as the plan it was.
    is_known = plan.training.batch_size != DEFAULTS.training.batch_size and plan.mesh.data_degree > 0
    return plan.mesh.data_degree * plan.training.gradient_accumulation if is_known else 0


def _lacks_samples(plan: PlanSections) -> bool:
    return plan.training.batch_size < _num_passes(plan)


def _has_uneven_microbatches(plan: PlanSections) -> bool:
    parts = _num_passes(plan) * plan.pipeline.num_microbatches
    return plan.mesh.pp > 1 and parts > 0 and not _lacks_samples(plan) and plan.training.batch_size % parts != 0


def _passes_in_words(plan: PlanSections) -> str:
    return (
        f"data-parallel degree {plan.mesh.data_degree} × training.gradient_accumulation"
        f" {plan.training.gradient_accumulation}"
    )


BATCH_RULES = (
    CompatibilityRule(
        name="too-few-samples",
        keys=("training.batch_size", "training.gradient_accumulation"),
        clashes=_lacks_samples,
        reason="every pass of every rank needs at least one sample",
        way_out="raise training.batch_size: every pass of every rank needs at least one sample",
        text=lambda plan: (
            f"training.batch_size {plan.training.batch_size} is below {_passes_in_words(plan)} = {_num_passes(plan)}"
        ),
    ),
    CompatibilityRule(
        name="uneven-microbatches",
        keys=("training.batch_size", "pipeline.num_microbatches", "mesh.pp"),
        clashes=_has_uneven_microbatches,
        reason="a pipeline cuts every rank's pass into microbatches of equal size",
        way_out="make training.batch_size a multiple of that product, or change pipeline.num_microbatches",
        text=lambda plan: (
            f"training.batch_size {plan.training.batch_size} is not a multiple of {_passes_in_words(plan)} ×"
            f" pipeline.num_microbatches {plan.pipeline.num_microbatches} ="
            f" {_num_passes(plan) * plan.pipeline.num_microbatches}"
        ),
    ),
)


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
