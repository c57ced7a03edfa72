"""Rules about the mesh, its shards and its pipeline."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections
from torsh_distributed.plan.sections.mesh import SPLITS_BACKWARD


def splits_model(plan: PlanSections) -> bool:
    """Whether ranks hold different parts of the model or of a sequence, so axes have to be composed."""
    mesh = plan.mesh
    return max(mesh.tp, mesh.pp, mesh.cp) > 1 or (mesh.shard > 1 and mesh.ep > 1)


def shards_params(plan: PlanSections) -> bool:
    """Whether parameters and gradients are sharded, not the optimizer state alone."""
    return plan.mesh.shard > 1 and plan.fsdp.strategy not in ("shard_optimizer", "no_shard")


def _lacks_microbatches(plan: PlanSections) -> bool:
    """torch's 1F1B and DualPipeV begin with a microbatch for every stage."""
    config, pp = plan.pipeline, plan.mesh.pp
    needed = {"one_f_one_b": pp, "dual_pipe_v": pp * config.stages_per_rank}.get(config.schedule, 1)
    return pp > 1 and config.num_microbatches < needed


def _has_uneven_rounds(plan: PlanSections) -> bool:
    """torch's interleaved schedules run in rounds of about one microbatch for each rank, all of one size."""
    config, pp = plan.pipeline, plan.mesh.pp
    if pp <= 1 or config.schedule not in ("interleaved_one_f_one_b", "interleaved_zero_bubble"):
        return False
    return config.num_microbatches % max(1, config.num_microbatches // pp) != 0


def _has_wrong_split_points(plan: PlanSections) -> bool:
    config, pp = plan.pipeline, plan.mesh.pp
    if pp <= 1 or config.balance != "manual":
        return False
    points = config.split_points
    return len(set(points)) != len(points) or len(points) + 1 != _num_stages(plan)


def _num_stages(plan: PlanSections) -> int:
    return plan.mesh.pp * plan.pipeline.stages_per_rank


AXES_RULES = (
    CompatibilityRule(
        name="no-shard-with-shards",
        keys=("fsdp.strategy", "mesh.shard"),
        clashes=lambda plan: plan.fsdp.strategy == "no_shard" and plan.mesh.shard != 1,
        reason="nothing would be sharded",
        way_out="set mesh.shard = 1 (and mesh.dp for replicas), or choose another fsdp.strategy",
        is_impossible=True,
    ),
    CompatibilityRule(
        name="hybrid-without-replicas",
        keys=("fsdp.strategy", "mesh.dp", "mesh.shard"),
        clashes=lambda plan: plan.fsdp.strategy == "hybrid_shard" and 1 in (plan.mesh.dp, plan.mesh.shard),
        reason="it needs replicas of shards",
        way_out="give both mesh.dp and mesh.shard a degree above 1",
        is_impossible=True,
        text=lambda plan: (
            f'fsdp.strategy "hybrid_shard" needs replicas of shards, but mesh.dp is {plan.mesh.dp} and mesh.shard is'
            f" {plan.mesh.shard}"
        ),
    ),
    CompatibilityRule(
        name="sharded-optimizer-on-split-model",
        keys=("fsdp.strategy", "mesh.tp", "mesh.pp", "mesh.cp"),
        clashes=lambda plan: (
            plan.mesh.shard > 1
            and plan.fsdp.strategy == "shard_optimizer"
            and max(plan.mesh.tp, plan.mesh.pp, plan.mesh.cp) > 1
        ),
        reason="the optimizer state alone is sharded over replicas of the whole model only",
        way_out='shard parameters too: fsdp.strategy = "full_shard"',
    ),
    CompatibilityRule(
        name="split-backward-with-freed-params",
        keys=("pipeline.schedule", "fsdp.strategy", "mesh.shard"),
        clashes=lambda plan: (
            plan.mesh.pp > 1
            and plan.mesh.shard > 1
            and plan.pipeline.schedule in SPLITS_BACKWARD
            and plan.fsdp.strategy != "shard_grad_op"
        ),
        reason="the second half of its backward needs the parameters that forward used, and they are freed by then",
        way_out='keep them gathered: fsdp.strategy = "shard_grad_op"',
    ),
    CompatibilityRule(
        name="too-few-microbatches",
        keys=("pipeline.num_microbatches", "pipeline.schedule", "mesh.pp"),
        clashes=_lacks_microbatches,
        reason="the schedule begins with a microbatch for every stage",
        way_out='raise pipeline.num_microbatches, or use pipeline.schedule = "gpipe"',
        text=lambda plan: (
            f"pipeline.num_microbatches {plan.pipeline.num_microbatches} is below the {_num_stages(plan)} stages of"
            f" pipeline.schedule {plan.pipeline.schedule}, which begins with a microbatch for every stage"
        ),
    ),
    CompatibilityRule(
        name="uneven-rounds",
        keys=("pipeline.num_microbatches", "pipeline.schedule", "mesh.pp"),
        clashes=_has_uneven_rounds,
        reason="interleaved schedules run in rounds of equal size, about one microbatch for each pipeline rank",
        way_out="make pipeline.num_microbatches a multiple of mesh.pp",
        text=lambda plan: (
            f"pipeline.num_microbatches {plan.pipeline.num_microbatches} does not split into equal rounds over mesh.pp"
            f" {plan.mesh.pp}, as pipeline.schedule {plan.pipeline.schedule} needs"
        ),
    ),
    CompatibilityRule(
        name="split-points-for-other-stages",
        keys=("pipeline.split_points", "pipeline.stages_per_rank", "mesh.pp"),
        clashes=_has_wrong_split_points,
        reason="every stage but the first begins at one of them",
        way_out="name the first layer of each stage but the first, each once",
        text=lambda plan: (
            f"{len(plan.pipeline.split_points)} pipeline.split_points make {len(set(plan.pipeline.split_points)) + 1}"
            f" stages, but mesh.pp {plan.mesh.pp} × pipeline.stages_per_rank {plan.pipeline.stages_per_rank} ="
            f" {_num_stages(plan)} are wanted"
        ),
    ),
)
