"""[distributed]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal
from torsh_distributed.comm.backends.capabilities import BackendType
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.sections.distributed import BACKENDS, DistributedConfig


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"backend": "glooo"},
            (
                "distributed.backend must be auto, gloo, nccl, torsh, shm, mpi4py, ucc, fake, one per device "
                "such as cpu:gloo,cuda:nccl, or a name that backend_module registers; got 'glooo'"
            ),
            "did you mean gloo?",
            id="unknown-backend",
        ),
        pytest.param(
            {"deterministic": True, "algorithm": "ring"},
            ("distributed.algorithm 'ring' does not add in the order of ranks, as distributed.deterministic requires"),
            "use one of: backend, auto, reduce_scatter_all_gather, pipelined",
            id="algorithm-out-of-order",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"distributed": keys}, message, hint)


def test_a_plan_knows_every_backend_that_exists() -> None:
    assert {kind.value for kind in BackendType} <= set(BACKENDS)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS, "cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_a_backend_may_be_given_for_each_device(backend: str) -> None:
    assert DistributedConfig(backend=backend).backend == backend


@pytest.mark.parametrize("backend", ["", "gloo,", "tpu:gloo", ":gloo", "cpu:gloo;cuda:nccl", "cpu:auto"])
def test_an_unknown_backend_is_refused(backend: str) -> None:
    with pytest.raises(ConfigurationError, match="backend must be auto, gloo"):
        DistributedConfig(backend=backend)
