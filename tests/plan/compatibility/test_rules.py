"""Every rule fires for a minimal plan, and its way out validates; a valid plan is not refused later."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.strategies import meshes, plans
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.choose import strategy_kind
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.parallel.pipeline.schedule import make_schedule, stages_of_rank
from torsh_distributed.parallel.sharded.compression import check_method
from torsh_distributed.plan import ExpertConfig, PipelineConfig, Plan
from torsh_distributed.plan.compatibility.rules import RULES, broken_rules
from torsh_distributed.plan.problems import keys_of
from torsh_distributed.plan.sections.mesh import STAGES_PER_RANK

Document = dict[str, dict[str, Any]]

STATE_ONLY = {"enabled": True, "params": False, "grads": False}

CASES: dict[str, tuple[Document, Document, int]] = {
    "no-shard-with-shards": (
        {"fsdp": {"strategy": "no_shard"}, "mesh": {"shard": 2}},
        {"mesh": {"dp": 2, "shard": 1}},
        2,
    ),
    "hybrid-without-replicas": (
        {"fsdp": {"strategy": "hybrid_shard"}, "mesh": {"dp": 1, "shard": 4}},
        {"mesh": {"dp": 2, "shard": 2}},
        4,
    ),
    "sharded-optimizer-on-split-model": (
        {"fsdp": {"strategy": "shard_optimizer"}, "mesh": {"shard": 2, "tp": 2}},
        {"fsdp": {"strategy": "full_shard"}},
        4,
    ),
    "split-backward-with-freed-params": (
        {"mesh": {"shard": 2, "pp": 2}, "pipeline": {"schedule": "zbv_zero_bubble", "stages_per_rank": 2}},
        {"fsdp": {"strategy": "shard_grad_op"}},
        4,
    ),
    "too-few-microbatches": (
        {"mesh": {"pp": 4}, "pipeline": {"num_microbatches": 2}},
        {"pipeline": {"schedule": "gpipe"}},
        4,
    ),
    "uneven-rounds": (
        {
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "interleaved_one_f_one_b", "stages_per_rank": 2, "num_microbatches": 5},
        },
        {"pipeline": {"num_microbatches": 4}},
        2,
    ),
    "split-points-for-other-stages": (
        {"mesh": {"pp": 2}, "pipeline": {"balance": "manual", "split_points": ["layers.1", "layers.2"]}},
        {"pipeline": {"split_points": ["layers.1"]}},
        2,
    ),
    "nothing-to-average": ({"mesh": {"tp": 2}, "compress": {"method": "int8"}}, {"mesh": {"dp": 2}}, 2),
    "bucket-settings-with-shards": (
        {"mesh": {"shard": 2}, "distributed": {"deterministic": True}},
        {"fsdp": {"strategy": "shard_optimizer"}},
        2,
    ),
    "two-formats-for-gradients": (
        {"compress": {"method": "int8"}, "precision": {"reduce_dtype": "bf16"}},
        {"compress": {"method": "bf16"}, "precision": {"reduce_dtype": "same"}},
        2,
    ),
    "whole-gradient-method-on-shards": (
        {"mesh": {"shard": 2}, "compress": {"method": "powersgd"}},
        {"mesh": {"dp": 2}},
        2,
    ),
    "ef21-on-shards": (
        {"mesh": {"shard": 2}, "compress": {"method": "int8", "error_feedback": "ef21"}},
        {"compress": {"error_feedback": "ef14"}},
        2,
    ),
    "adapted-compression-of-parts": (
        {"mesh": {"shard": 2}, "compress": {"method": "topk:0.1", "adapt": "conservative"}},
        {"compress": {"adapt": "none"}},
        2,
    ),
    "compression-of-shards-with-context": (
        {"mesh": {"shard": 2, "cp": 2}, "compress": {"method": "int8"}},
        {"mesh": {"dp": 2, "shard": 1}},
        4,
    ),
    "offload-on-split-model": (
        {"mesh": {"tp": 2}, "offload": STATE_ONLY},
        {"mesh": {"tp": 1, "shard": 2}},
        2,
    ),
    "activations-on-disk-of-split-model": (
        {"mesh": {"tp": 2}, "activation": {"disk_dir": "/tmp"}},
        {"mesh": {"tp": 1, "shard": 2}},
        2,
    ),
    "half-offloaded-shards": (
        {"mesh": {"shard": 2}, "offload": {"enabled": True, "grads": False}},
        {"offload": STATE_ONLY},
        2,
    ),
    "offload-with-sharded-optimizer": (
        {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}, "offload": STATE_ONLY},
        {"fsdp": {"strategy": "shard_grad_op"}},
        2,
    ),
    "paging-with-fp16": (
        {"offload": {"enabled": True}, "precision": {"dtype": "fp16"}},
        {"precision": {"dtype": "bf16"}},
        2,
    ),
    "paging-with-gradient-format": (
        {"offload": {"enabled": True}, "compress": {"method": "int8"}},
        {"offload": STATE_ONLY},
        2,
    ),
    "uneven-experts": ({"mesh": {"ep": 2}, "expert": {"num_experts": 7}}, {"expert": {"num_experts": 8}}, 2),
    "more-hot-copies-than-experts": (
        {"mesh": {"ep": 2}, "expert": {"num_experts": 4, "hot_copies": 3}},
        {"expert": {"hot_copies": 1}},
        2,
    ),
    "moving-sharded-experts": (
        {"mesh": {"ep": 2, "shard": 2}, "expert": {"rebalance_threshold": 0.3}},
        {"mesh": {"dp": 2, "shard": 1}},
        4,
    ),
    "compression-with-experts": (
        {"mesh": {"ep": 2}, "compress": {"method": "int8"}},
        {"compress": {"method": "none"}},
        2,
    ),
    "reduce-dtype-with-experts": (
        {"mesh": {"ep": 2}, "precision": {"reduce_dtype": "bf16"}},
        {"mesh": {"shard": 2}},
        2,
    ),
    "capacity-with-context": (
        {"mesh": {"ep": 2, "cp": 2}, "expert": {"overflow": "reroute"}},
        {"expert": {"overflow": "none"}},
        4,
    ),
    "random-experts-with-tensor": (
        {"mesh": {"tp": 2}, "expert": {"router_jitter": 0.1}},
        {"expert": {"router_jitter": 0.0}},
        2,
    ),
    "sharded-optimizer-with-experts": (
        {"mesh": {"ep": 2, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
        {"fsdp": {"strategy": "full_shard"}},
        4,
    ),
    "offload-with-experts": (
        {"mesh": {"ep": 2}, "offload": STATE_ONLY},
        {"offload": {"enabled": False}},
        2,
    ),
    "too-few-samples": (
        {"training": {"batch_size": 4, "gradient_accumulation": 3}},
        {"training": {"batch_size": 6}},
        2,
    ),
    "uneven-microbatches": (
        {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 64}, "training": {"batch_size": 8}},
        {"pipeline": {"num_microbatches": 8}},
        2,
    ),
    "gathered-loss-in-passes": (
        {"training": {"gather_for_loss": True, "gradient_accumulation": 2}},
        {"training": {"gradient_accumulation": 1}},
        2,
    ),
    "gathered-loss-of-parts": (
        {"training": {"gather_for_loss": True}, "mesh": {"pp": 2}},
        {"mesh": {"pp": 1, "shard": 2}},
        2,
    ),
    "gathered-loss-declared": (
        {"training": {"gather_for_loss": True, "loss_is": "sum"}},
        {"training": {"loss_is": "auto"}},
        2,
    ),
    "global-mean-of-parts": (
        {"training": {"loss_is": "global_mean", "gradient_accumulation": 2}},
        {"training": {"gradient_accumulation": 1}},
        2,
    ),
    "shared-statistics-of-parts": (
        {"training": {"sync_batch_norm": True}, "mesh": {"pp": 2}},
        {"mesh": {"pp": 1, "shard": 2}},
        2,
    ),
    "shared-statistics-in-changing-world": (
        {"training": {"sync_batch_norm": True}, "elastic": {"enabled": True, "mode": "in_place"}},
        {"elastic": {"mode": "restart"}},
        2,
    ),
    "compiled-model-in-parts": (
        {"mesh": {"shard": 2}, "compile": {"enabled": True, "scope": "model"}},
        {"compile": {"scope": "layers"}},
        2,
    ),
    "compiled-model-with-recomputation": (
        {"compile": {"enabled": True, "scope": "model"}, "activation": {"strategy": "uniform"}},
        {"compile": {"scope": "layers"}},
        1,
    ),
    "compiled-ring-attention": (
        {"mesh": {"cp": 2}, "compile": {"enabled": True}},
        {"mesh": {"cp": 1, "dp": 2}},
        2,
    ),
    "compiled-sequence-pieces": (
        {"compile": {"enabled": True}, "mesh": {"dp": 1, "tp": 2}, "tensor": {"sequence_parallel": True}},
        {"tensor": {"sequence_parallel": False}},
        2,
    ),
    "compiled-whole-layers-on-tp": (
        {"compile": {"enabled": True, "graph_breaks": "refuse"}, "mesh": {"dp": 1, "tp": 2}},
        {"compile": {"graph_breaks": "warn"}},
        2,
    ),
    "compiled-split-backward": (
        {
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "zbv_zero_bubble", "stages_per_rank": 2},
            "compile": {"enabled": True},
        },
        {"pipeline": {"schedule": "interleaved_one_f_one_b"}},
        2,
    ),
    "compiled-paging": (
        {"offload": {"enabled": True}, "compile": {"enabled": True}},
        {"offload": STATE_ONLY},
        2,
    ),
    "auto-optimization-in-place": (
        {"training": {"auto_optimize": "exact"}, "elastic": {"enabled": True}},
        {"elastic": {"mode": "restart"}},
        2,
    ),
    "cuda-graphs-of-layers": (
        {"compile": {"enabled": True, "cuda_graphs": True}},
        {"compile": {"scope": "model"}},
        1,
    ),
    "cuda-graphs-with-accumulation": (
        {
            "compile": {"enabled": True, "cuda_graphs": True, "scope": "model"},
            "training": {"gradient_accumulation": 2},
        },
        {"training": {"gradient_accumulation": 1}},
        1,
    ),
    "casts-without-shards": (
        {"mesh": {"dp": 2}, "precision": {"dtype": "bf16", "output_dtype": "fp32"}},
        {"mesh": {"dp": 1, "shard": 2}},
        2,
    ),
    "fp8-on-split-layers": (
        {"mesh": {"tp": 2}, "precision": {"dtype": "fp8"}},
        {"mesh": {"tp": 1, "shard": 2}},
        2,
    ),
    "fp8-with-paging": (
        {"offload": {"enabled": True}, "precision": {"dtype": "fp8"}},
        {"offload": STATE_ONLY},
        2,
    ),
    "fused-loss-of-split-head": (
        {"mesh": {"tp": 2}, "training": {"fused_loss": True}},
        {"mesh": {"tp": 1, "shard": 2}},
        2,
    ),
    "fused-loss-in-compiled-model": (
        {"training": {"fused_loss": True}, "compile": {"enabled": True, "scope": "model"}},
        {"compile": {"scope": "layers"}},
        1,
    ),
    "fused-loss-with-searched-graph": (
        {"training": {"fused_loss": True}, "ddp": {"find_unused_parameters": True}},
        {"ddp": {"find_unused_parameters": False}},
        2,
    ),
    "smaller-microbatch-in-parts": (
        {"mesh": {"shard": 2}, "recovery": {"out_of_memory": "smaller_microbatch"}},
        {"mesh": {"shard": 1, "dp": 2}},
        2,
    ),
    "skipped-batches-are-lost": (
        {"recovery": {"divergence": "roll_back"}, "training": {"exactly_once": True}},
        {"recovery": {"skip_batches": False}},
        1,
    ),
    "roll-back-without-checkpoints": (
        {"recovery": {"divergence": "roll_back", "roll_back_from": "checkpoint"}},
        {"checkpoint": {"enabled": True}},
        1,
    ),
    "copies-in-changing-world": (
        {"recovery": {"divergence": "roll_back"}, "elastic": {"enabled": True}},
        {"elastic": {"mode": "restart"}},
        1,
    ),
    "servers-on-split-model": (
        {"server": {"training": "asynchronous"}, "mesh": {"shard": 2}},
        {"mesh": {"shard": 1, "dp": 2}},
        2,
    ),
    "servers-with-averaged-gradients": (
        {"server": {"training": "asynchronous"}, "compress": {"method": "int8"}},
        {"server": {"push_codec": "int8"}, "compress": {"method": "none"}},
        2,
    ),
    "servers-with-fp16": (
        {"server": {"training": "asynchronous"}, "precision": {"dtype": "fp16"}},
        {"precision": {"dtype": "bf16"}},
        2,
    ),
    "servers-with-samples-of-all": (
        {"server": {"training": "asynchronous"}, "training": {"gather_for_loss": True}},
        {"server": {"training": "none"}},
        2,
    ),
    "servers-with-recovery-of-steps": (
        {"server": {"training": "asynchronous"}, "recovery": {"divergence": "roll_back", "roll_back_from": "memory"}},
        {"recovery": {"divergence": "raise"}},
        2,
    ),
    "codecs-of-elastic-averaging": (
        {"server": {"training": "elastic_averaging", "push_codec": "int8"}},
        {"server": {"push_codec": None}},
        2,
    ),
}
"""Rule to a minimal plan that breaks it, what its way out changes, and the ranks of the broken plan."""


def merged(document: Document, changes: Document) -> Document:
    return {section: {**document.get(section, {}), **changes.get(section, {})} for section in {**document, **changes}}


def with_one_replica(document: Document) -> Document:
    return merged({"mesh": {"dp": 1}}, document) if "mesh" in document else document


def test_every_rule_has_its_case() -> None:
    names = [rule.name for rule in RULES]
    assert names == list(CASES)
    for rule in RULES:
        assert set(rule.keys) <= set(keys_of(Plan)), rule.name


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_a_rule_refuses_its_plan_and_its_way_out_validates(rule: Any) -> None:
    document, changes, world_size = CASES[rule.name]
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_dict(with_one_replica(document)).validate(world_size)
    assert caught.value.hint == rule.way_out, "one problem: this rule's"
    assert set(rule.keys) & {word.strip(":,") for word in caught.value.message.split()}, "keys are written in full"
    repaired = Plan.from_dict(with_one_replica(merged(document, changes)))
    degrees = repaired.mesh.degrees.values()
    repaired.validate(world_size if -1 in degrees else math.prod(degrees))


def test_all_clashes_are_reported_at_once() -> None:
    plan = Plan.from_dict(
        {
            "mesh": {"dp": 1, "tp": 2},
            "offload": {"enabled": True},
            "compress": {"method": "int8"},
        }
    )
    with pytest.raises(ConfigurationError) as caught:
        plan.validate(2)
    assert str(caught.value).splitlines()[:4] == [
        "plan has 3 problems:",
        (
            "  compress.method = int8 does not go together with mesh.tp = 2: no two ranks average gradients here"
            " (leave the setting out, or add replicas: mesh.dp above 1)"
        ),
        (
            "  offload.enabled = true does not go together with mesh.tp = 2: offload works on replicas and on shards"
            " only (set offload.enabled = false, or split over mesh.dp and mesh.shard only)"
        ),
        (
            "  offload.enabled = true does not go together with compress.method = int8: offload.params and"
            " offload.grads send gradients as they are"
            " (leave the format out, or set offload.params = false and offload.grads = false)"
        ),
    ]


def build_schedule(config: PipelineConfig, num_ranks: int) -> None:
    """Torch's schedule over stages that are numbers alone; raises ConfigurationError where torch refuses it."""
    num_stages = num_ranks * config.stages_per_rank
    mine = stages_of_rank(config.schedule, 0, num_ranks=num_ranks, num_stages=num_stages)
    numbers = {"num_stages": num_stages, "group_size": num_ranks, "group_rank": 0, "submod": None}
    make_schedule(config, [SimpleNamespace(stage_index=index, **numbers) for index in mine], loss_fn=print)


@pytest.mark.slow
@given(plan=plans(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_plan_that_validates_is_not_refused_when_the_strategy_is_chosen(plan: Plan, data: st.DataObject) -> None:
    world_size = data.draw(st.sampled_from([2, 4]))
    try:
        resolved = plan.replace(mesh=data.draw(meshes(world_size)))
        resolved.validate(world_size)
    except ConfigurationError:
        return
    MeshLayout(resolved.mesh)
    kind = strategy_kind(resolved)
    if resolved.mesh.pp > 1:
        build_schedule(resolved.pipeline, resolved.mesh.pp)
    if kind == "sharded" and resolved.compress.method != "none":
        check_method(resolved.compress, has_replicas=resolved.mesh.dp > 1)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, pipeline=PipelineConfig(num_microbatches=5)),
        Plan(dp=64),
        Plan(dp=1, ep=2, cp=2),
        Plan(shard=-1),
    ],
    ids=["microbatches of a default batch", "more ranks than a default batch", "default overflow", "open degree"],
)
def test_a_saved_plan_is_judged_as_the_plan_it_was(plan: Plan) -> None:
    again = Plan.from_dict(plan.to_dict())
    assert again == plan
    assert [rule.name for rule in broken_rules(again)] == [rule.name for rule in broken_rules(plan)]


def test_what_is_refused_without_a_world_is_refused_in_every_world() -> None:
    sections = {"compress": {"method": "int8"}, "precision": {"reduce_dtype": "bf16"}}
    open_degree = Plan.from_dict({"mesh": {"shard": -1}, **sections})
    open_degree.validate()
    open_degree.validate(2)
    with pytest.raises(ConfigurationError, match="the codec decides"):
        Plan.from_dict({"mesh": {"dp": 2}, **sections}).validate()


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_the_rules_refuse_exactly_the_microbatches_that_torch_refuses(schedule: Any, pp: int) -> None:
    for num_microbatches in range(1, 14):
        config = PipelineConfig(
            schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule][0], num_microbatches=num_microbatches
        )
        is_valid = not list(broken_rules(Plan(dp=1, pp=pp, pipeline=config)))
        try:
            build_schedule(config, pp)
        except ConfigurationError:
            assert not is_valid, num_microbatches
        else:
            assert is_valid, num_microbatches


def test_a_degree_that_fills_the_world_is_judged_with_the_world() -> None:
    plan = Plan.from_dict({"mesh": {"shard": -1}, "distributed": {"deterministic": True}})
    assert not list(broken_rules(plan))
    plan.validate()
    plan.validate(1)
    with pytest.raises(ConfigurationError, match="shards travel as the backend sends them"):
        plan.validate(2)


def test_experts_of_other_libraries_have_a_number_of_their_own() -> None:
    Plan(ep=3).validate(world_size=3)
    with pytest.raises(ConfigurationError, match=r"num_experts 4 does not spread evenly over mesh\.ep 3"):
        Plan(ep=3, expert=ExpertConfig(num_experts=4))


def test_experts_that_every_rank_holds_may_have_any_number() -> None:
    plan = Plan(ep=2, expert=ExpertConfig(num_experts=7, placement="replicated"))
    assert (plan.mesh.ep, plan.expert.num_experts) == (2, 7)
