"""Rules about training through parameter servers, where ranks take their steps alone."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.gradient_rules import compresses
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections


def is_served(plan: PlanSections) -> bool:
    """Whether parameter servers keep the ranks together."""
    return plan.server.training != "none"


SERVER_RULES = (
    CompatibilityRule(
        name="servers-on-split-model",
        keys=("server.training", "mesh.shard", "mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep", "offload.enabled"),
        clashes=lambda plan: (
            is_served(plan)
            and (
                max(plan.mesh.shard, plan.mesh.tp, plan.mesh.pp, plan.mesh.cp, plan.mesh.ep) > 1 or plan.offload.enabled
            )
        ),
        reason="each rank trains a whole model by itself",
        way_out='split over mesh.dp only, or set server.training = "none"',
    ),
    CompatibilityRule(
        name="servers-with-averaged-gradients",
        keys=("server.training", "compress.method", "precision.reduce_dtype"),
        clashes=lambda plan: is_served(plan) and (compresses(plan) or plan.precision.reduce_dtype != "same"),
        reason="gradients are not averaged over ranks",
        way_out="use server.push_codec, which is for what ranks send to servers",
    ),
    CompatibilityRule(
        name="servers-with-fp16",
        keys=("server.training", "precision.dtype"),
        clashes=lambda plan: is_served(plan) and plan.precision.dtype == "fp16",
        reason="all ranks agree to skip a step that overflows, and these do not take their steps together",
        way_out='use precision.dtype = "bf16"',
    ),
    CompatibilityRule(
        name="servers-with-samples-of-all",
        keys=("server.training", "training.gather_for_loss", "training.sync_batch_norm", "training.loss_is"),
        clashes=lambda plan: (
            is_served(plan)
            and (
                plan.training.gather_for_loss or plan.training.sync_batch_norm or plan.training.loss_is == "global_mean"
            )
        ),
        reason="a rank's step does not see the samples of others",
        way_out='leave these out, or set server.training = "none"',
    ),
    CompatibilityRule(
        name="servers-with-recovery-of-steps",
        keys=(
            "server.training",
            "elastic.enabled",
            "recovery.divergence",
            "recovery.out_of_memory",
            "training.auto_optimize",
        ),
        clashes=lambda plan: (
            is_served(plan)
            and (plan.elastic.enabled or plan.recovery.acts_on_steps or plan.training.auto_optimize != "off")
        ),
        reason="these change or repeat steps that all ranks take together",
        way_out="leave these out: AsyncSGD in a loop of one's own has workers that come and go",
    ),
    CompatibilityRule(
        name="codecs-of-elastic-averaging",
        keys=("server.training", "server.push_codec", "server.pull_codec"),
        clashes=lambda plan: (
            plan.server.training == "elastic_averaging"
            and (plan.server.push_codec is not None or plan.server.pull_codec is not None)
        ),
        reason="the centre moves by exactly what a rank moves",
        way_out="leave the codecs out",
    ),
)
