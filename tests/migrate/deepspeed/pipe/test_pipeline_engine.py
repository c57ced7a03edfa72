"""Pipelines train as DeepSpeed's do, and as one process does."""

from __future__ import annotations

import io
import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.real_deepspeed import use_deepspeed
from tests.bed.world import World
from tests.migrate.deepspeed.conftest import DeepSpeedWorld

WIDTH, STEPS, GAS, MICRO = 12, 5, 4, 3


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.linear(inputs))


def config(stage: int, clip: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def batches(replica: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(40 + replica)
    inputs = [torch.randn(MICRO, WIDTH, generator=generator) for _ in range(STEPS * GAS)]
    return [(one, one.roll(1, dims=1)) for one in inputs]


def train(deepspeed: Any, stage: int, clip: float, method: str = "uniform") -> tuple[list[float], float]:
    """Losses of whole batches, and the loss of evaluating one; runs on ranks."""
    net = deepspeed.PipelineModule(
        layers=[deepspeed.LayerSpec(Layer, WIDTH) for _ in range(5)],
        num_stages=2,
        loss_fn=functional.mse_loss,
        partition_method=method,
        seed_layers=True,
        base_seed=7,
    )
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.0, foreach=False)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(stage, clip))
    if deepspeed.__name__.startswith("torsh_distributed"):
        assert engine._core.plan.notices() == ()  # of keys that no script has written
    replica = engine.grid.get_data_parallel_id()
    data = iter(batches(replica))
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    evaluated = float(engine.eval_batch(iter(batches(replica)[:GAS])))
    assert engine.global_steps == STEPS
    with pytest.raises(Exception, match="pipeline mode"):
        engine(torch.ones(1, WIDTH))
    return losses, evaluated


def one_process(num_replicas: int, clip: float = 0.0) -> list[float]:
    """The same by torch alone."""
    layers = []
    for index in range(5):
        torch.manual_seed(7 + index)
        layers.append(Layer(WIDTH))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    data = [batches(replica) for replica in range(num_replicas)]
    losses = []
    for step in range(STEPS):
        parts = [one for found in data for one in found[step * GAS : (step + 1) * GAS]]
        loss = torch.stack([functional.mse_loss(model(inputs), targets) for inputs, targets in parts]).mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _ours(stage: int, clip: float) -> tuple[list[float], float]:
    from torsh_distributed.migrate import deepspeed

    return train(deepspeed, stage, clip)


def _theirs(clip: float) -> tuple[list[float], float]:
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    deepspeed = use_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.LayerSpec = __import__("deepspeed.pipe", fromlist=["LayerSpec"]).LayerSpec
    assert dist.is_initialized()
    return train(deepspeed, 0, clip)


def test_two_stages_train_as_one_process_does(world: World) -> None:
    for losses, _ in world.run(_ours, 0, 0.5, num_ranks=2, backend="torsh", timeout_s=60):
        assert losses == pytest.approx(one_process(1, clip=0.5), rel=1e-5)


class Judge(nn.Module):
    """A last layer that returns the loss itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.linear(inputs) - 1.0).square().mean()


def _without_loss_fn() -> tuple[list[float], float]:
    from torsh_distributed.migrate import deepspeed

    net = deepspeed.PipelineModule(
        layers=[deepspeed.LayerSpec(Layer, WIDTH), deepspeed.LayerSpec(Judge, WIDTH)],
        num_stages=2,
        partition_method="uniform",
        seed_layers=True,
        base_seed=7,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(0, 0.0))
    data = iter(batches(0))
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    return losses, float(engine.eval_batch(iter(batches(0))))


def test_without_a_loss_function_the_last_layer_returns_the_loss(world: World) -> None:
    torch.manual_seed(7)
    first = Layer(WIDTH)
    torch.manual_seed(8)
    model = nn.Sequential(first, Judge(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = [one for one, _ in batches(0)]
    losses = []
    for step in range(4):
        loss = torch.stack([model(one) for one in inputs[(step % 3) * GAS : (step % 3 + 1) * GAS]]).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for trained, evaluated in world.run(_without_loss_fn, num_ranks=2, backend="torsh", timeout_s=60):
        assert [*trained, evaluated] == pytest.approx(losses, rel=1e-5)


def _logits() -> list[Any]:
    from torsh_distributed.migrate import deepspeed

    net = deepspeed.PipelineModule(
        layers=[deepspeed.LayerSpec(Layer, WIDTH) for _ in range(2)],
        num_stages=2,
        loss_fn=functional.mse_loss,
        seed_layers=True,
        base_seed=7,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(0, 0.0))
    loss, outputs = engine.eval_batch(iter(batches(0)), return_logits=True)
    alone = engine.eval_batch(iter(batches(0)), compute_loss=False)
    with pytest.raises(AssertionError, match="mean or sum"):
        engine.eval_batch(iter(batches(0)), reduce_output=None)
    return [float(loss), outputs, torch.equal(alone, outputs), engine.training]


def test_evaluating_returns_the_outputs_on_every_rank(world: World) -> None:
    layers = []
    for index in range(2):
        torch.manual_seed(7 + index)
        layers.append(Layer(WIDTH))
    inputs, targets = (torch.cat(side) for side in zip(*batches(0)[:GAS], strict=True))
    with torch.no_grad():
        wanted = nn.Sequential(*layers)(inputs)
    for loss, outputs, is_same, is_training in world.run(_logits, num_ranks=2, backend="torsh", timeout_s=60):
        torch.testing.assert_close(outputs, wanted)
        assert loss == pytest.approx(functional.mse_loss(wanted, targets).item(), rel=1e-5)
        assert (is_same, is_training) == (True, True)


def _one_microbatch() -> list[float]:
    """Losses with fewer microbatches than stages."""
    from torsh_distributed.migrate import deepspeed

    torch.manual_seed(7)
    net = deepspeed.PipelineModule(
        layers=[deepspeed.LayerSpec(Layer, WIDTH) for _ in range(2)], num_stages=2, loss_fn=functional.mse_loss
    )
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        config={**config(0, 0.0), "gradient_accumulation_steps": 1},
    )
    return [float(engine.train_batch(iter([batch]))) for batch in batches(0)[:3]]


def test_fewer_microbatches_than_stages_train_as_one_process_does(world: World) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(Layer(WIDTH), Layer(WIDTH))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for inputs, targets in batches(0)[:3]:
        loss = functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for found in world.run(_one_microbatch, num_ranks=2, backend="torsh", timeout_s=60):
        assert found == pytest.approx(losses, rel=1e-5)


def _ends_read() -> tuple[list[float], float, int]:
    """Losses of three stages of which the middle one has no data; the second batch has other shapes."""
    from torsh_distributed.migrate import deepspeed

    class Named(deepspeed.PipelineModule):  # type: ignore[misc,name-defined]  # the package's names are lazy
        """A script's own subclass, with what it asks of `engine.module`."""

        def batch_of(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0] * 2, pair[1]

    torch.manual_seed(7)
    net = Named(layers=[Layer(WIDTH) for _ in range(3)], num_stages=3, loss_fn=functional.mse_loss)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config(0, 0.0)
    )
    engine.set_batch_fn(engine.module.batch_of)
    assert not any(param.is_meta for param in engine.module.parameters())
    assert engine.micro_batches == GAS
    data = iter(_uneven()) if engine.is_first_stage() or engine.is_last_stage() else None
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(2)]
    with pytest.raises(StopIteration, match=r"[01] of 4"):
        engine.train_batch(data_iter=data)
    data = iter(batches(0)) if engine.is_first_stage() or engine.is_last_stage() else None
    return losses, float(engine.eval_batch(data)), engine.mpu.get_pipe_parallel_rank()


def _uneven() -> list[tuple[Tensor, Tensor]]:
    """Two batches of GAS microbatches, of two sizes, and one microbatch more."""
    found = batches(0)[: 2 * GAS + 1]
    return [
        (inputs[:2], targets[:2]) if index >= GAS else (inputs, targets)
        for index, (inputs, targets) in enumerate(found)
    ]


def test_stages_between_the_ends_need_no_data(world: World) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(*(Layer(WIDTH) for _ in range(3)))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for pairs in (_uneven()[:GAS], _uneven()[GAS : 2 * GAS], batches(0)[:GAS]):
        loss = torch.stack([functional.mse_loss(model(inputs * 2), targets) for inputs, targets in pairs]).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = world.run(_ends_read, num_ranks=3, backend="torsh", timeout_s=80)
    for rank, (trained, evaluated, stage) in enumerate(found):
        assert [*trained, evaluated] == pytest.approx(losses, rel=1e-5)
        assert stage == rank


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1])
def test_replicas_of_stages_train_as_one_process_does(world: World, stage: int) -> None:
    for losses, _ in world.run(_ours, stage, 0.0, num_ranks=4, backend="torsh", timeout_s=100):
        assert losses == pytest.approx(one_process(2), rel=1e-5)


@pytest.mark.needs_deepspeed
@pytest.mark.matrix
def test_a_pipeline_trains_as_deepspeeds_does(world: World, deepspeed_world: DeepSpeedWorld) -> None:
    # Without clipping: in the norm of an fp32 pipeline DeepSpeed 0.19.8 counts the first stage alone.
    theirs = deepspeed_world.run_theirs(_theirs, 0.0, timeout_s=110)
    ours = world.run(_ours, 0, 0.0, num_ranks=2, backend="torsh", timeout_s=60)
    for (mine, evaluated), (other, other_evaluated) in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
        assert evaluated == pytest.approx(other_evaluated, rel=1e-5)


def _tells_what_has_no_effect() -> str:
    from torsh_distributed.migrate import deepspeed
    from torsh_distributed.migrate.deepspeed.pipe import pipeline_engine

    said = io.StringIO()
    pipeline_engine._log.addHandler(logging.StreamHandler(said))
    net = deepspeed.PipelineModule(layers=[Layer(WIDTH)], num_stages=1, loss_fn=functional.mse_loss)
    given = {**config(1, 0.0), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=given)
    return said.getvalue()


def test_a_format_of_sums_that_a_pipeline_does_not_have_is_told(world: World) -> None:
    (said,) = world.run(_tells_what_has_no_effect, num_ranks=1, backend="torsh", timeout_s=60)
    assert (
        "grad_accum_dtype fp32 has no effect in a pipeline: gradients of microbatches add up in torch.bfloat16" in said
    )
