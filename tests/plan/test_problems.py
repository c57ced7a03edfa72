"""What a user reads about a broken plan: every problem at once, each with its key and a way out."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan


def refusal(document: dict[str, Any]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_dict(document)
    return caught.value


def test_all_problems_are_told_at_once() -> None:
    error = refusal(
        {
            "mesh": {"dp": "2", "tpp": 2},
            "trainin": {"steps": 3},
            "training": {"dp": 2, "steps": 0},
            "precision": {"dtype": "bf32"},
            "ddp": 4,
            "fsdp": {"wrap_classes": ["Block", 7]},
            "elastic": {"min_workers": 4, "max_workers": 2, "heartbeat": 5},
            "expert": {"num_experts": 2, "num_experts_per_token": 3},
        }
    )
    assert str(error).splitlines() == [
        "plan has 10 problems:",
        "  mesh.dp must be a number of ranks, at least 1, or -1 to fill the world; got '2'",
        "  mesh.tpp is not a key of [mesh] (did you mean tp?)",
        (
            "  ddp must be a section with keys of its own (max_bucket_size_mb, min_bucket_size_mb, auto_size,"
            " bucketing, overlap, find_unused_parameters, static_graph, gradient_as_bucket_view,"
            " broadcast_buffers); got 4"
        ),
        "  fsdp.wrap_classes must be a list of text; element 1 is 7",
        (
            "  expert.num_experts_per_token 3 is above expert.num_experts 2"
            " (a token cannot go to more experts than there are)"
        ),
        "  precision.dtype must be one of fp32, bf16, fp16, fp8; got 'bf32' (did you mean fp32?)",
        "  training.steps must be an integer, at least 1; got 0",
        "  training.dp is not a key of [training] (dp belongs in [mesh])",
        "  elastic.heartbeat is not a key of [elastic] (did you mean heartbeat_timeout_s?)",
        "  trainin is not a key of a plan (did you mean training?)",
        "  hint: fix these lines; `torsh plan schema` lists every key, `torsh plan validate FILE` checks again",
    ]


@pytest.mark.parametrize(
    ("document", "message", "hint"),
    [
        ({"dp": 2}, "dp is not a key of a plan", "dp belongs in [mesh]"),
        ({"learning_rate": 2}, "learning_rate is not a key of a plan", "learning_rate belongs in [training]"),
        ({"mesh": {"dpp": 2}}, "mesh.dpp is not a key of [mesh]", "did you mean dp?"),
        ({"Mesh": {"dp": 2}}, "Mesh is not a key of a plan", "did you mean mesh?"),
        ({"optimizer": {}}, "optimizer is not a key of a plan", "known keys: mesh, distributed, ddp, "),
        ({"mesh": {"gradient_cliping": 2}}, "mesh.gradient_cliping is not", "did you mean training.gradient_clipping?"),
        ({"training": {"lr": 2}}, "training.lr is not a key of [training]", "known keys: steps, batch_size, "),
        ({"precision": {"dtype": "BF16"}}, "precision.dtype must be one of fp32, bf16, ", "did you mean bf16?"),
        ({"ddp": {"static_graph": 1}}, "ddp.static_graph must be true or false; got 1", ""),
        ({"training": {"steps": True}}, "training.steps must be an integer, at least 1; got True", ""),
        ({"training": {"seed": 1.5}}, "training.seed must be an integer, at least 0, at most 4294967295; got 1.5", ""),
        (
            {"training": {"gradient_clipping": 0}},
            "training.gradient_clipping must be a number (left out: none), above 0; got 0",
            "",
        ),
        (
            {"training": {"learning_rate": float("nan")}},
            "training.learning_rate must be a number, above 0; got nan",
            "",
        ),
        ({"retry": {"jitter": 2}}, "retry.jitter must be a number, at least 0, at most 1; got 2", ""),
        ({"observe": {"events_dir": ""}}, "observe.events_dir must be text (left out: none), not empty; got ''", ""),
        ({"fsdp": {"wrap_names": "layers"}}, "fsdp.wrap_names must be a list of text; got 'layers'", ""),
        ({"mesh": [1]}, "mesh must be a section with keys of its own (dp, shard, tp, pp, ep, cp); got [1]", ""),
        ({"mesh": {1: 2}}, "mesh.1 is not a key of [mesh]", "known keys: dp"),
    ],
)
def test_one_problem_is_a_sentence_with_a_hint(document: dict[str, Any], message: str, hint: str) -> None:
    error = refusal(document)
    assert error.message.startswith(f"plan: {message}")
    assert (error.hint or "").startswith(hint)


def test_a_huge_value_does_not_flood_the_message() -> None:
    assert len(refusal({"training": {"steps": "x" * 10_000}}).message) < 200


def test_the_error_crosses_processes() -> None:
    error = refusal({"mesh": {"dpp": 2}})
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
