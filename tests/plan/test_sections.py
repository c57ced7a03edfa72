"""Sections: values that do not go together are refused with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from torsh_distributed.comm.backends.capabilities import BackendType
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import CompressConfig, DistributedConfig, Plan
from torsh_distributed.plan.sections.compress import METHODS
from torsh_distributed.plan.sections.distributed import BACKENDS

DOES_NOT_WORK: list[tuple[dict[str, Any], str, str]] = [
    (
        {"ddp": {"min_bucket_size_mb": 30}},
        "ddp.min_bucket_size_mb 30 is above max_bucket_size_mb 25",
        "lower the first or raise the second",
    ),
    (
        {"ddp": {"static_graph": True, "find_unused_parameters": True}},
        "ddp.find_unused_parameters and static_graph exclude each other",
        "keep static_graph if every step uses the same parameters: it finds the unused ones once",
    ),
    (
        {"pipeline": {"schedule": "zbv_zero_bubble"}},
        "pipeline.stages_per_rank is 1, but the schedule zbv_zero_bubble holds exactly 2 on each rank",
        "set stages_per_rank = 2, or choose another schedule",
    ),
    (
        {"pipeline": {"schedule": "interleaved_one_f_one_b"}},
        "pipeline.stages_per_rank is 1, but the schedule interleaved_one_f_one_b holds at least 2 on each rank",
        "set stages_per_rank = 2, or choose another schedule",
    ),
    (
        {"pipeline": {"stages_per_rank": 2}},
        "pipeline.stages_per_rank is 2, but the schedule one_f_one_b holds exactly 1 on each rank",
        "set stages_per_rank = 1, or choose another schedule",
    ),
    (
        {"pipeline": {"split_points": ["layers.4"]}},
        'pipeline.split_points and balance = "manual" go together; one is set without the other',
        "set both, or neither",
    ),
    (
        {"expert": {"num_experts": 2, "num_experts_per_token": 4}},
        "expert.num_experts_per_token 4 is above num_experts 2",
        "a token cannot go to more experts than there are",
    ),
    (
        {"expert": {"num_experts": 6}, "mesh": {"ep": 4}},
        "expert.num_experts 6 does not spread evenly over mesh.ep 4",
        "make expert.num_experts a multiple of mesh.ep",
    ),
    (
        {"expert": {"num_experts_per_token": 1, "normalize_weights": True}},
        "expert.normalize_weights with num_experts_per_token 1 makes every weight 1, and the gate learns nothing",
        "leave normalize_weights false, or send a token to 2 experts",
    ),
    (
        {"expert": {"num_experts": 6, "gate_groups": 4}},
        "expert.gate_groups 4 does not divide num_experts 6",
        "groups have the same number of experts",
    ),
    (
        {"expert": {"gate_groups": 8, "gate_top_groups": 1}},
        "expert.gate_top_groups 1 of 8 groups of 1 does not give a token 2 experts to choose",
        "take more of them, at most gate_groups",
    ),
    (
        {"expert": {"gate_grouping": "learned"}},
        "expert.gate_grouping = learned needs gate_groups above 1, and no gate_top_groups",
        "an expert then belongs to every group a little: there is no group to choose from",
    ),
    (
        {"expert": {"placement": "replicated", "rebalance_threshold": 0.3}},
        "expert.rebalance_threshold 0.3 has nothing to move: every rank has every expert",
        'leave rebalance_threshold out, or set placement = "contiguous"',
    ),
    (
        {"expert": {"placement": "replicated", "hot_copies": 2}},
        "expert.hot_copies 2 has nothing to lend: every rank has every expert",
        'leave hot_copies out, or set placement = "contiguous"',
    ),
    (
        {"expert": {"num_experts": 4, "hot_copies": 4}},
        "expert.hot_copies 4 is not below num_experts 4",
        "a rank borrows experts that it does not have; 1 is a fair start",
    ),
    (
        {
            "offload": {
                "enabled": True,
                "params": False,
                "grads": False,
                "optimizer_state": False,
            }
        },
        "offload.enabled is true, but params, grads and optimizer_state are all false",
        "choose at least one of them, or set enabled = false",
    ),
    (
        {"elastic": {"min_workers": 4, "max_workers": 2}},
        "elastic.min_workers 4 is above max_workers 2",
        "lower the first or raise the second",
    ),
    (
        {"training": {"batch_size": 2, "gradient_accumulation": 4}},
        "training.gradient_accumulation 4 is above batch_size 2",
        "a pass needs a sample at least",
    ),
    (
        {"training": {"steps": 10, "warmup_steps": 20}},
        "training.warmup_steps 20 is above steps 10",
        "the learning rate would never reach its value; warm up for fewer steps",
    ),
    (
        {"fsdp": {"strategy": "no_shard"}, "mesh": {"shard": 2}},
        "fsdp.strategy = no_shard does not go together with mesh.shard = 2: nothing would be sharded",
        "set mesh.shard = 1 (and mesh.dp for replicas), or choose another fsdp.strategy",
    ),
    (
        {"fsdp": {"strategy": "hybrid_shard"}, "mesh": {"shard": -1}},
        'fsdp.strategy "hybrid_shard" needs replicas of shards, but mesh.dp is 1 and mesh.shard is -1',
        "give both mesh.dp and mesh.shard a degree above 1",
    ),
    (
        {"distributed": {"backend": "glooo"}},
        (
            "distributed.backend must be auto, gloo, nccl, torsh, shm, mpi4py, ucc, fake, or one per device"
            " such as cpu:gloo,cuda:nccl;"
            " got 'glooo'"
        ),
        "did you mean gloo?",
    ),
    (
        {"compress": {"method": "powersdg:4"}},
        "compress.method 'powersdg' is unknown",
        "did you mean powersgd?",
    ),
    (
        {"compress": {"method": "topk:7"}},
        "compress.method 'topk:7': after the colon goes a number from 1e-06 to 1 (share of the elements that travels)",
        'the default is "topk:0.1"',
    ),
    (
        {"compress": {"method": "powersgd:1.5"}},
        "compress.method 'powersgd:1.5': after the colon goes an integer from 1 to 1024 (rank of the factors)",
        'the default is "powersgd:4"',
    ),
    (
        {"compress": {"method": "nbit:1"}},
        (
            "compress.method nbit:1 with error_feedback 'ef14' diverges: a message drawn between two levels is further"
            " from the gradient than nothing is, so what is left out grows from step to step"
        ),
        'use "sign" for one bit with error feedback, "nbit:2", or error_feedback = "none"',
    ),
    (
        {"compress": {"method": "fp16:2"}},
        "compress.method fp16 takes no number; got 'fp16:2'",
        'write "fp16"',
    ),
]


@pytest.mark.parametrize(("document", "message", "hint"), DOES_NOT_WORK)
def test_what_does_not_work_is_refused_with_the_numbers(document: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_dict(document)
    assert caught.value.message == f"plan: {message}"
    assert caught.value.hint == hint


def test_a_plan_knows_every_backend_that_exists() -> None:
    assert {kind.value for kind in BackendType} <= set(BACKENDS)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS, "cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_a_backend_may_be_given_for_each_device(backend: str) -> None:
    assert DistributedConfig(backend=backend).backend == backend


@pytest.mark.parametrize("backend", ["", "gloo,", "tpu:gloo", ":gloo", "cpu:gloo;cuda:nccl", "cpu:auto"])
def test_a_backend_that_is_none_is_refused(backend: str) -> None:
    with pytest.raises(ConfigurationError, match="backend must be auto, gloo"):
        DistributedConfig(backend=backend)


def test_a_method_carries_its_number_or_the_default() -> None:
    assert CompressConfig(method="powersgd:2").name == "powersgd"
    assert CompressConfig(method="powersgd:2").parameter == 2
    assert CompressConfig(method="topk").parameter == 0.1
    assert CompressConfig(method="fp16").parameter is None


@pytest.mark.parametrize("method", METHODS)
def test_the_default_number_of_a_method_is_allowed(method: str) -> None:
    number = METHODS[method]
    spelled = method if number is None else f"{method}:{number.default:g}"
    assert CompressConfig(method=spelled).parameter == CompressConfig(method=method).parameter
