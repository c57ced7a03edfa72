"""Rules about how gradients travel: compression, formats, algorithms.

Rules about losses and statistics over the samples of all ranks.
Rules about the batch: every pass of every rank, and every microbatch of it, needs samples.
They apply where the plan says how large a batch is; otherwise the loader decides.
"""

from __future__ import annotations

from torsh_distributed.plan.compatibility.axis_rules import shards_params
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import DEFAULTS, PlanSections
from torsh_distributed.plan.sections.compress import METHODS


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
        name="global-mean-of-parts",
        keys=("training.loss_is", "training.gradient_accumulation", "mesh.pp"),
        clashes=lambda plan: (
            plan.training.loss_is == "global_mean" and (plan.training.gradient_accumulation > 1 or plan.mesh.pp > 1)
        ),
        reason="td.global_mean divides by what all ranks count in this pass, and a step has several",
        way_out="set training.gradient_accumulation = 1 and mesh.pp = 1, and [activation] to save memory",
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


BUCKET_KEYS = ("distributed.algorithm", "distributed.deterministic", "distributed.rate_limit_gbps")


def compresses(plan: PlanSections) -> bool:
    """Whether gradients travel encoded."""
    return plan.compress.method != "none"


def _sets_buckets(plan: PlanSections) -> bool:
    asked = plan.distributed
    return asked.algorithm != "backend" or asked.deterministic or asked.rate_limit_gbps is not None


def _compresses_shards(plan: PlanSections) -> bool:
    """Whether codecs work inside the reduce-scatter: with replicas of shards they work between the replicas."""
    return compresses(plan) and shards_params(plan) and plan.mesh.dp == 1


def _has_nothing_to_average(plan: PlanSections) -> bool:
    mesh = plan.mesh
    is_alone = mesh.data_degree * mesh.cp == 1 and max(mesh.tp, mesh.pp) > 1
    return is_alone and (compresses(plan) or _sets_buckets(plan) or plan.precision.reduce_dtype != "same")


GRADIENT_RULES = (
    CompatibilityRule(
        name="nothing-to-average",
        keys=("compress.method", "precision.reduce_dtype", *BUCKET_KEYS, "mesh.tp", "mesh.pp"),
        clashes=_has_nothing_to_average,
        reason="no two ranks average gradients here",
        way_out="leave the setting out, or add replicas: mesh.dp above 1",
    ),
    CompatibilityRule(
        name="bucket-settings-with-shards",
        keys=(*BUCKET_KEYS, "mesh.shard"),
        clashes=lambda plan: shards_params(plan) and _sets_buckets(plan),
        reason="shards travel as the backend sends them",
        way_out='leave the setting out, or shard the optimizer only: fsdp.strategy = "shard_optimizer"',
    ),
    CompatibilityRule(
        name="two-formats-for-gradients",
        keys=("compress.method", "precision.reduce_dtype"),
        clashes=lambda plan: (
            compresses(plan)
            and plan.precision.reduce_dtype != "same"
            and (plan.mesh.shard == 1 or plan.fsdp.strategy in ("shard_optimizer", "no_shard"))
        ),
        reason="the codec decides in which format gradients travel",
        way_out='use compress.method = "fp16" or "bf16", or leave precision.reduce_dtype at "same"',
    ),
    CompatibilityRule(
        name="whole-gradient-method-on-shards",
        keys=("compress.method", "mesh.shard"),
        clashes=lambda plan: _compresses_shards(plan) and METHODS[plan.compress.name].needs_whole_gradients,
        reason="the method needs whole gradients, and a rank has those of its shard",
        way_out="choose int8, topk or another method for single elements, or add replicas: mesh.dp above 1",
    ),
    CompatibilityRule(
        name="ef21-on-shards",
        keys=("compress.error_feedback", "mesh.shard"),
        clashes=lambda plan: _compresses_shards(plan) and plan.compress.error_feedback == "ef21",
        reason="ef21 needs whole gradients, and a rank has those of its shard",
        way_out='set compress.error_feedback = "ef14", or add replicas: mesh.dp above 1',
    ),
    CompatibilityRule(
        name="adapted-compression-of-parts",
        keys=("compress.adapt", "mesh.shard", "mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep"),
        clashes=lambda plan: (
            plan.compress.adapt != "none"
            and max(plan.mesh.shard, plan.mesh.tp, plan.mesh.pp, plan.mesh.cp, plan.mesh.ep) > 1
        ),
        reason="ranks with different parameters see different errors, and would send different amounts",
        way_out='set compress.adapt = "none", or use replicas alone: mesh.dp',
    ),
    CompatibilityRule(
        name="compression-of-shards-with-context",
        keys=("compress.method", "mesh.shard", "mesh.cp"),
        clashes=lambda plan: compresses(plan) and plan.mesh.shard > 1 and plan.mesh.cp > 1,
        reason="shards are averaged over the ranks of a sequence too, where nothing encodes them",
        way_out="leave compression out, or use mesh.dp in place of mesh.shard",
    ),
)
