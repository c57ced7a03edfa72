"""`deepspeed.comm` communicates and counts; checkpointing recomputes; helpers help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.surface import activation_checkpointing, comm_calls, script_helpers
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator
from torsh_distributed.migrate.deepspeed.surface.refused_names import refused_names


def _communicate() -> Any:
    comm = comm_calls.comm_names()
    comm["configure"](enabled=True, prof_ops=["all_reduce"], prof_all=False)
    value = torch.full((4,), float(dist.get_rank() + 1))
    comm["all_reduce"](value, prof=True, log_name="mine")
    gathered = torch.empty(2)
    comm["allgather_fn"](gathered, torch.tensor([float(dist.get_rank())]))
    outputs = [torch.empty(2)]
    comm["all_gather_coalesced"](outputs, [torch.tensor([dist.get_rank() + 5.0])])
    comm["inference_all_reduce"](value)
    table = comm["log_summary"](show_straggler=True, return_dict=True)
    comm["configure"](enabled=False)
    return value.tolist(), gathered.tolist(), outputs[0].tolist(), table


def test_collectives_run_and_are_logged(world: World) -> None:
    for value, gathered, coalesced, table in world.run(_communicate, num_ranks=2, backend="torsh"):
        assert value == [6.0] * 4
        assert gathered == [0.0, 1.0]
        assert coalesced == [5.0, 6.0]
        assert list(table) == ["all_reduce"]
        assert table["all_reduce"][16]["count"] == 1
        assert table["all_reduce"][16]["straggler_ms"] >= 0


@pytest.mark.parametrize("in_cpu", [False, True])
def test_a_checkpointed_layer_has_the_same_gradients(in_cpu: bool) -> None:
    activation_checkpointing.configure(None, checkpoint_in_cpu=in_cpu, partition_activations=True)
    assert activation_checkpointing.is_configured()
    layer, inputs = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    calls = []

    def run(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tanh(layer(value))

    activation_checkpointing.checkpoint(run, inputs).sum().backward()
    assert len(calls) == 2
    (expected,) = torch.autograd.grad(torch.tanh(layer(inputs)).sum(), inputs)
    torch.testing.assert_close(inputs.grad, expected)


def test_the_tracker_forks_random_states() -> None:
    activation_checkpointing.model_parallel_cuda_manual_seed(1)
    tracker = activation_checkpointing.get_cuda_rng_tracker()
    first = torch.rand(1)
    with tracker.fork():
        inside = torch.rand(1)
    activation_checkpointing.model_parallel_cuda_manual_seed(1)
    with tracker.fork():
        assert torch.equal(torch.rand(1), inside)
    assert torch.equal(torch.rand(1), first)


def test_helpers() -> None:
    with script_helpers.OnDevice(dtype=torch.float16, device="meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta
    assert layer.weight.dtype is torch.float16
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert script_helpers.set_z3_leaf_modules(model, ["ReLU", nn.Linear]) == [model[0], model[1]]
    assert script_helpers.get_z3_leaf_modules(model) == [model[0], model[1]]
    accelerator = get_accelerator()
    assert accelerator.device_count() >= 1
    assert accelerator.current_device_name().startswith(("cpu", "cuda"))
    assert accelerator.memory_allocated() >= 0
    with pytest.raises(FeatureNotAvailable, match="serve the model"):
        refused_names("deepspeed")["init_inference"](None)
