"""Formats of shards beside torch's own: what a model gets and returns, and in which format passes are added up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    """A layer that notes what it was given, and gives it to its product as that needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.inner(x.to(self.inner.weight.dtype))


def model_of_blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


def formats_of_torch(keys: dict[str, Any]) -> tuple[list[list[torch.dtype]], torch.dtype, float]:
    model = model_of_blocks()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    output = {"fp32": torch.float32, "fp16": torch.float16}.get(keys.get("output_dtype", ""))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, cast_forward_inputs=keys.get("cast_forward_inputs", True), output_dtype=None
    )
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, None, output, policy.cast_forward_inputs),
    )
    out = model(batch())
    return [block.seen for block in model], out.dtype, out.float().square().mean().item()


def formats_of_ours(keys: dict[str, Any]) -> tuple[list[list[torch.dtype]], torch.dtype, float]:
    model, found = model_of_blocks(), []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        found.append(outputs.dtype)
        return outputs.float().square().mean()

    plan = Plan.from_dict(
        {
            "mesh": {"dp": 1, "shard": 2},
            "precision": {"dtype": "bf16", **keys},
            "fsdp": {"wrap_classes": ["Block"]},
            "training": {"steps": 1, "batch_size": 8},
        }
    )
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=loss_fn)
    whole = torch.cat([batch(), batch()])
    [loss] = [engine.step(one) for one in engine.batches([(whole, torch.zeros(8))])]
    return [list(dict.fromkeys(block.seen)) for block in model], found[-1], loss


@pytest.mark.parametrize("keys", [{}, {"output_dtype": "fp32"}, {"cast_forward_inputs": False, "output_dtype": "fp16"}])
def test_inputs_and_outputs_have_the_formats_that_torch_gives_them(world: World, keys: dict[str, Any]) -> None:
    ours, theirs = world.run(formats_of_ours, keys), world.run(formats_of_torch, keys)
    for (seen, out, loss), (torch_seen, torch_out, torch_loss) in zip(ours, theirs, strict=True):
        assert seen == torch_seen
        assert out == torch_out
        assert loss == pytest.approx(torch_loss, rel=1e-3)


def weight_after(mesh: dict[str, int], reduce_dtype: str) -> float:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    plan = Plan.from_dict(
        {
            "mesh": mesh,
            "precision": {"dtype": "bf16", "reduce_dtype": reduce_dtype},
            "training": {"steps": 1, "batch_size": 16, "gradient_accumulation": 8},
        }
    )
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, loss_fn=lambda out, _: out.mean())
    inputs = torch.ones(16, 1)
    inputs[:2] = 4096  # the first pass of one rank: beside it the others are below the last bit of bf16
    for one in engine.batches([(inputs, torch.zeros(16))]):
        engine.step(one)
    weight = model.weight.detach()
    return float(weight.full_tensor() if isinstance(weight, DTensor) else weight)


def test_passes_are_added_up_in_fp32(world: World) -> None:
    exact = -(2 * 4096 + 14) / 16
    alone = world.run(weight_after, {"dp": 1}, "same", num_ranks=1)
    assert alone == [pytest.approx(exact, abs=0.01)]
    assert world.run(weight_after, {"dp": 1, "shard": 2}, "same")[0] == pytest.approx(exact, abs=0.01)
    # What the plan asks for is done: FSDP2 then adds up in 16 bits.
    assert abs(world.run(weight_after, {"dp": 1, "shard": 2}, "bf16")[0] - exact) > 0.2


def test_casts_of_fsdp_are_refused_without_shards() -> None:
    with pytest.raises(ConfigurationError, match=r"precision\.output_dtype"):
        Plan.from_dict({"mesh": {"dp": 2}, "precision": {"dtype": "bf16", "output_dtype": "fp32"}}).validate(2)
