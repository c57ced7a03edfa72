"""Rules about what makes a step faster: compilation, fp8, the fused loss."""

from __future__ import annotations

from torsh_distributed.plan.compatibility.axis_rules import splits_model
from torsh_distributed.plan.compatibility.recovery_rules import pages_model
from torsh_distributed.plan.compatibility.rule import CompatibilityRule
from torsh_distributed.plan.plan_sections import PlanSections
from torsh_distributed.plan.sections.mesh import SPLITS_BACKWARD

_SPLITTING = ("mesh.shard", "mesh.tp", "mesh.pp", "mesh.cp", "mesh.ep")


def compiles_model(plan: PlanSections) -> bool:
    """Whether the whole model is one graph."""
    return plan.compile.enabled and plan.compile.scope == "model"


def splits_head(plan: PlanSections) -> bool:
    """Whether no rank has the whole head and the loss."""
    return max(plan.mesh.tp, plan.mesh.pp) > 1


def searches_graph(plan: PlanSections) -> bool:
    """Whether torch's DDP looks for parameters behind the model's output."""
    return plan.ddp.find_unused_parameters or plan.ddp.static_graph


def can_fuse_loss(plan: PlanSections) -> bool:
    """Whether `training.fused_loss = "auto"` may turn itself on: no rule below is against it, and the head stays
    in memory until the loss is known."""
    return not (splits_head(plan) or compiles_model(plan) or searches_graph(plan) or pages_model(plan))


def _has_parts(plan: PlanSections) -> bool:
    """Whether ranks hold parts of the model, so something happens between its layers."""
    return splits_model(plan) or plan.mesh.shard > 1 or plan.mesh.ep > 1


SPEED_RULES = (
    CompatibilityRule(
        name="compiled-model-in-parts",
        keys=("compile.scope", *_SPLITTING),
        clashes=lambda plan: compiles_model(plan) and _has_parts(plan),
        reason="shards, stages and experts communicate between layers, where one graph would have to break",
        way_out='set compile.scope = "layers"',
    ),
    CompatibilityRule(
        name="compiled-model-with-recomputation",
        keys=("compile.scope", "activation.strategy"),
        clashes=lambda plan: compiles_model(plan) and plan.activation.strategy != "none",
        reason="layers inside one graph cannot be recomputed one by one; torch already recomputes what is cheap",
        way_out='set compile.scope = "layers", or activation.strategy = "none"',
    ),
    CompatibilityRule(
        name="compiled-ring-attention",
        keys=("compile.enabled", "mesh.cp"),
        clashes=lambda plan: plan.compile.enabled and plan.mesh.cp > 1,
        reason="attention over pieces of a sequence is put in place at run time, which a compiled layer does not see",
        way_out="leave compile out, or split along another axis than mesh.cp",
    ),
    CompatibilityRule(
        name="compiled-sequence-pieces",
        keys=("compile.enabled", "tensor.sequence_parallel"),
        clashes=lambda plan: plan.compile.enabled and plan.mesh.tp > 1 and plan.tensor.sequence_parallel,
        reason="norms then work on pieces of the sequence that are exchanged in the middle of a layer",
        way_out="leave compile out, or set tensor.sequence_parallel = false",
    ),
    CompatibilityRule(
        name="compiled-whole-layers-on-tp",
        keys=("compile.graph_breaks", "mesh.tp", "mesh.ep"),
        clashes=lambda plan: (
            plan.compile.enabled and plan.compile.graph_breaks == "refuse" and max(plan.mesh.tp, plan.mesh.ep) > 1
        ),
        reason="split layers and spread experts communicate inside a layer, where its graph has to break",
        way_out='set compile.graph_breaks = "warn": these breaks are expected, and are not warned of',
    ),
    CompatibilityRule(
        name="compiled-split-backward",
        keys=("compile.enabled", "pipeline.schedule"),
        clashes=lambda plan: plan.compile.enabled and plan.mesh.pp > 1 and plan.pipeline.schedule in SPLITS_BACKWARD,
        reason="the schedule runs backward in two halves, and a compiled layer has only a whole one",
        way_out='use pipeline.schedule = "one_f_one_b" or "interleaved_one_f_one_b", or leave compile out',
    ),
    CompatibilityRule(
        name="compiled-paging",
        keys=("compile.enabled", "offload.enabled"),
        clashes=lambda plan: plan.compile.enabled and pages_model(plan),
        reason="offload.params and offload.grads move parameters in the middle of a layer",
        way_out="leave compile out, or set offload.params = false and offload.grads = false",
    ),
    CompatibilityRule(
        name="auto-optimization-in-place",
        keys=("training.auto_optimize", "elastic.enabled"),
        clashes=lambda plan: (
            plan.training.auto_optimize != "off" and plan.elastic.enabled and plan.elastic.mode == "in_place"
        ),
        reason="ranks that come and go have not counted the same updates, before which all of them change",
        way_out='set training.auto_optimize = "off", or elastic.mode = "restart"',
    ),
    CompatibilityRule(
        name="cuda-graphs-of-layers",
        keys=("compile.cuda_graphs", "compile.scope"),
        clashes=lambda plan: plan.compile.enabled and plan.compile.cuda_graphs and plan.compile.scope != "model",
        reason="a recording is bound to one layer's parameters",
        way_out='set compile.scope = "model", or compile.cuda_graphs = false',
    ),
    CompatibilityRule(
        name="cuda-graphs-with-accumulation",
        keys=("compile.cuda_graphs", "training.gradient_accumulation"),
        clashes=lambda plan: (
            compiles_model(plan) and plan.compile.cuda_graphs and plan.training.gradient_accumulation > 1
        ),
        reason="a replayed backward writes its gradients over those of the pass before",
        way_out="set compile.cuda_graphs = false, or training.gradient_accumulation = 1",
    ),
    CompatibilityRule(
        name="casts-without-shards",
        keys=("precision.output_dtype", "precision.cast_forward_inputs", "mesh.shard"),
        clashes=lambda plan: (
            plan.mesh.shard == 1 and (plan.precision.output_dtype != "same" or not plan.precision.cast_forward_inputs)
        ),
        reason="they are FSDP2's; without shards autocast chooses the format of each operation, and losses are in fp32",
        way_out='shard parameters (mesh.shard above 1), or leave precision.output_dtype at "same" and'
        " precision.cast_forward_inputs at true",
    ),
    CompatibilityRule(
        name="fp8-on-split-layers",
        keys=("precision.dtype", "mesh.tp"),
        clashes=lambda plan: plan.precision.dtype == "fp8" and plan.mesh.tp > 1,
        reason="a rank along mesh.tp holds a part of each layer, and would scale it by other values than its peers",
        way_out='use precision.dtype = "bf16", or mesh.shard in place of mesh.tp',
    ),
    CompatibilityRule(
        name="fp8-with-paging",
        keys=("precision.dtype", "offload.enabled"),
        clashes=lambda plan: plan.precision.dtype == "fp8" and pages_model(plan),
        reason="offload.params and offload.grads keep parameters in forms of their own",
        way_out='use precision.dtype = "bf16", or set offload.params = false and offload.grads = false',
    ),
    CompatibilityRule(
        name="fused-loss-of-split-head",
        keys=("training.fused_loss", "mesh.tp", "mesh.pp"),
        clashes=lambda plan: plan.training.fused_loss is True and splits_head(plan),
        reason="mesh.tp splits the head itself, and a pipeline hands the output of its last stage on",
        way_out="leave training.fused_loss out, or split over mesh.dp and mesh.shard",
    ),
    CompatibilityRule(
        name="fused-loss-in-compiled-model",
        keys=("training.fused_loss", "compile.scope"),
        clashes=lambda plan: plan.training.fused_loss is True and compiles_model(plan),
        reason="the head would be inside the graph, which returns whole logits",
        way_out='set compile.scope = "layers", or call linear_cross_entropy in the model itself',
    ),
    CompatibilityRule(
        name="fused-loss-with-searched-graph",
        keys=("training.fused_loss", "ddp.find_unused_parameters", "ddp.static_graph"),
        clashes=lambda plan: plan.training.fused_loss is True and searches_graph(plan),
        reason="the graph is searched from the model's output, before the loss uses its head",
        way_out="set ddp.find_unused_parameters and ddp.static_graph to false, or leave training.fused_loss out",
    ),
)
