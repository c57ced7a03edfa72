"""What a plan says about gradients, through `parallelize`: all of it has its effect, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.bed.world import World
from tests.parallel.example_models import build, data, flat, steps_of_one_process
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

COMPRESS = {"method": "topk:0.1", "warmup_steps": 1, "skip_below_numel": 100, "skip_names": ["2.*"]}


def engine(plan: dict[str, Any]) -> Engine:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return parallelize(model, optimizer, Plan.from_dict(plan), loss_fn=_loss)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)  # shards in fp16 give halves


def steps(trained: Engine, count: int) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    points, targets = data()
    found = []
    for _ in range(count):
        trained.step((points[rank::size], targets[rank::size]))
        found.append(_whole(trained.unwrapped))
    return found


def _whole(model: nn.Module) -> Tensor:
    """All parameters one after the other, also where ranks hold shards of them."""
    values = (param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters())
    return torch.cat([value.detach().flatten() for value in values])


def train_as_planned(plans: list[dict[str, Any]]) -> list[tuple[list[Tensor], Any]]:
    found = []
    for plan in plans:
        trained = engine(plan)
        weights = steps(trained, 4)
        assert isinstance(trained.model, DistributedDataParallel)
        found.append((weights, trained.model.bucket_config.model_dump()))
    return found


def test_how_gradients_travel_changes_nothing_about_them(world: World) -> None:
    plans: list[dict[str, Any]] = [
        {"ddp": {"overlap": False, "max_bucket_size_mb": 0.02, "min_bucket_size_mb": 0.01}},
        {"ddp": {"bucketing": False}},
        {"ddp": {"auto_size": True}},
        {"precision": {"reduce_dtype": "fp32"}},
        {"compress": {**COMPRESS, "warmup_steps": 99}},
    ]
    expected = steps_of_one_process(2)
    for found in world.run(train_as_planned, plans, timeout_s=60):
        for weights, _ in found:
            torch.testing.assert_close(weights[-1], expected[-1], rtol=1e-5, atol=1e-5)
        assert [config["overlap"] for _, config in found] == [False, True, True, True, True]
        assert not found[2][1]["auto_size"], "measured, and replaced by what came of it"


def resume(feedback: str) -> None:
    """Interrupted after three steps, with every rank's own state: the same bits as in one go."""
    plan = {"compress": {**COMPRESS, "error_feedback": feedback}, "training": {"steps": 6}}
    whole = steps(engine(plan), 6)
    first = engine(plan)
    steps(first, 3)
    state = first.state_dict()
    assert "residuals" in str(state["rank_state"]) or feedback == "ef21"
    second = engine(plan)
    second.load_state_dict(state)
    for one, other in zip(steps(second, 3), whole[3:], strict=True):
        assert torch.equal(one, other)
    # With the state of rank 0 on all ranks training goes on too, and replicas stay equal.
    shared = [state]
    dist.broadcast_object_list(shared)
    third = engine(plan)
    third.load_state_dict(shared[0])
    weights = steps(third, 3)[-1]
    every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    assert torch.equal(every[0], every[1])


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
def test_training_under_compression_resumes_with_the_same_bits(world: World, feedback: str) -> None:
    world.run(resume, feedback, timeout_s=60)


def train_in_half(feedback: str, mesh: dict[str, int]) -> None:
    """A loss scale that doubles every second step changes nothing: what was left out is scaled with it."""
    ends = []
    for interval in (2, 1000):
        precision: dict[str, Any] = {"dtype": "fp16", "init_loss_scale": 64.0, "loss_scale_growth_interval": interval}
        if mesh:  # shards are computed with in fp16: the norm's means must follow
            precision["buffer_dtype"] = "fp16"
        compress = {**COMPRESS, "error_feedback": feedback}
        trained = engine({"compress": compress, "precision": precision, "mesh": mesh})
        ends.append(steps(trained, 8)[-1])
        assert trained.precision.loss_scale == (1024.0 if interval == 2 else 64.0)
    start = flat(build())
    assert float((ends[0] - ends[1]).norm()) < 0.02 * float((ends[0] - start).norm())


@pytest.mark.parametrize(("feedback", "mesh"), [("ef14", {}), ("ef21", {}), ("ef14", {"dp": 1, "shard": 2})])
def test_the_loss_scale_may_change_under_compression(world: World, feedback: str, mesh: dict[str, int]) -> None:
    world.run(train_in_half, feedback, mesh, timeout_s=60)


def refuse() -> None:
    for plan, text in (
        ({"compress": COMPRESS, "mesh": {"tp": 2}}, "compress.method = topk:0.1 does not go together with mesh.tp = 2"),
        (
            {"precision": {"reduce_dtype": "bf16"}, "mesh": {"tp": 2}},
            "precision.reduce_dtype = bf16 does not go together with mesh.tp = 2",
        ),
    ):
        with pytest.raises(ConfigurationError, match=text):
            engine(plan)


def test_a_plan_that_compresses_where_nothing_would_is_refused(world: World) -> None:
    world.run(refuse)


class Heads(nn.Module):
    """Two heads; a batch says which of them count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        losses = [self.heads[number](inputs).square().mean() for number in wanted[0].nonzero().flatten().tolist()]
        return torch.stack(losses).sum()


def leave_a_head_out() -> tuple[str, bool, list[float]]:
    """A step with both heads, one in which each rank uses another, and what that did to the weights."""
    model = Heads()
    plan = Plan.from_dict({"training": {"loss_is": "mean"}})
    trained = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    inputs, both = torch.ones(2, 4), torch.ones(2, 2, dtype=torch.bool)
    losses = [trained.step((inputs, both))]
    before = flat(model)
    one = both.clone()
    one[:, dist.get_rank()] = False
    try:
        losses.append(trained.step((inputs, one)))
    except InvalidArgument as error:
        return str(error), torch.equal(before, flat(model)), losses
    return "no error", torch.equal(before, flat(model)), losses


def test_a_parameter_left_out_later_is_named_before_the_update(world: World) -> None:
    for rank, (said, is_unchanged, losses) in enumerate(world.run(leave_a_head_out, num_ranks=2)):
        assert f"the loss does not depend on heads.{rank}.weight, heads.{rank}.bias in this step" in said
        assert is_unchanged
        assert len(losses) == 1
