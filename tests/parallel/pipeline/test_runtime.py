"""Pipelines on real ranks train as one process does, under every schedule, and run as they were planned."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from tests.bed.world import World
from tests.parallel.reference import batches, build, train_alone
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.errors import ConfigurationError, InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.pipeline import PipelineParallel
from torsh_distributed.parallel.pipeline.schedule import planned_order
from torsh_distributed.plan.sections.mesh import STAGES_PER_RANK, PipelineConfig
from torsh_distributed.train.demos.gpt import next_character_loss


def make(kind: str, schedule: str, num_microbatches: int = 4, **options: Any) -> tuple[PipelineParallel, nn.Module]:
    config = PipelineConfig(
        schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule][0], num_microbatches=num_microbatches, **options
    )
    group = dist.group.WORLD
    assert group is not None
    model = build(kind, num_layers=4)
    return PipelineParallel(model, config, group=group, loss_fn=next_character_loss), model


def train(kind: str, schedule: str, num_steps: int = 3) -> list[float]:
    pipe, _ = make(kind, schedule, 8 if schedule == "dual_pipe_v" else 4)
    optimizer = torch.optim.AdamW(pipe.module.parameters(), lr=5e-3)
    losses = []
    for inputs, targets in batches(num_steps):
        optimizer.zero_grad()
        losses.append(pipe.step(inputs, targets).item())
        optimizer.step()
    check_order(pipe)
    check_evaluation(pipe, losses)
    held = sum(param.numel() for param in pipe.module.parameters())
    assert held < 0.75 * sum(param.numel() for param in build(kind, num_layers=4).parameters())
    return losses


def check_order(pipe: PipelineParallel) -> None:
    """What ran is what was planned, action by action; and there was a bubble to measure."""
    planned = list(chain(*planned_order(pipe.config, pipe.group.size())[pipe.group.rank()]))
    assert [(one.stage, one.kind, one.microbatch) for one in pipe.recorder.actions] == planned
    assert 0 < pipe.measured_timeline().bubble < 1
    assert pipe.computed_timeline().num_ranks == pipe.measured_timeline().num_ranks


def check_evaluation(pipe: PipelineParallel, losses: list[float]) -> None:
    inputs, targets = batches(1, batch=3)[0]
    value = pipe.evaluate(inputs, targets).item()
    assert 0 < value < losses[0] + 1
    out = pipe.forward({"ids": inputs})
    assert (out is not None) == pipe.is_last
    with torch.no_grad():
        everywhere = pipe.module(inputs)
    assert next_character_loss(everywhere, targets).item() == pytest.approx(value, abs=1e-5)


def train_all(cases: list[tuple[str, str]]) -> list[list[float]]:
    return [train(kind, schedule) for kind, schedule in cases]


def check(world: World, cases: list[tuple[str, str]], num_ranks: int, backend: str) -> None:
    expected = {kind: train_alone(kind, clip=1e9, num_layers=4, num_steps=3)[::2] for kind, _ in cases}
    for results in world.run(train_all, cases, num_ranks=num_ranks, backend=backend, timeout_s=60):
        for (kind, schedule), losses in zip(cases, results, strict=True):
            assert losses == pytest.approx(expected[kind], abs=1e-4), (kind, schedule)


def test_losses_on_two_ranks_are_those_of_one_process(world: World) -> None:
    check(world, [("gpt" if number % 2 else "llama", name) for number, name in enumerate(STAGES_PER_RANK)], 2, "torsh")


def test_losses_on_four_ranks_are_those_of_one_process(world: World) -> None:
    check(world, [("tied", "one_f_one_b"), ("tied", "gpipe")], 4, "gloo")


def refuse() -> None:
    pipe, _ = make("gpt", "one_f_one_b", 3)
    inputs, targets = batches(1)[0]
    with pytest.raises(TensorShapeMismatch, match="num_microbatches 3 does not divide the batch of 8"):
        pipe.step(inputs, targets)
    with pytest.raises(InvalidArgument, match="the batch does not have the inputs"):
        pipe.step({"idx": inputs}, targets)
    with pytest.raises(InvalidArgument, match="forward takes ids, but the batch has 2 inputs"):
        pipe.step((inputs, inputs), targets)
    with pytest.raises(InvalidArgument, match="without gradients only"):
        pipe.module(inputs)
    with pytest.raises(ConfigurationError, match="10 stages need as many layers, but the model has 8"):
        group = dist.group.WORLD
        assert group is not None
        config = PipelineConfig(schedule="looped_bfs", stages_per_rank=5)
        PipelineParallel(build("gpt", num_layers=4), config, group=group)


def test_what_does_not_fit_is_refused_on_every_rank(world: World) -> None:
    world.run(refuse, num_ranks=2)


class Counting(nn.Module):
    """Keeps count of the rows that passed through it, as a batch norm keeps their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.num_rows: Tensor
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_rows += len(x)
        return functional.dropout(self.linear(x), 0.5)


def count_rows() -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    config = PipelineConfig(schedule="one_f_one_b", num_microbatches=2)
    model = nn.Sequential(Counting(), Counting())
    pipe = PipelineParallel(model, config, group=group, loss_fn=functional.mse_loss)
    torch.manual_seed(0)
    pipe.step(torch.ones(6, 4), torch.ones(6, 4))
    drawn = float(torch.rand(()))
    torch.manual_seed(0)
    for _ in range(2):
        functional.dropout(torch.ones(3, 4), 0.5)
    assert drawn == float(torch.rand(())), "random numbers were drawn for the microbatches alone"
    return [int(buffer) for buffer in pipe.module.buffers()]


def test_shape_inference_leaves_no_trace_in_the_stages(world: World) -> None:
    assert world.run(count_rows) == [[6], [6]]


class Breaks(nn.Module):
    """A layer whose code fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks_in = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks_in == "forward":
            self.fail(x)
        out: Tensor = self.linear(x)
        if self.breaks_in == "backward":
            out.register_hook(self.fail)
        return out

    def fail(self, _: Tensor) -> None:
        raise LookupError("the layer has lost its table")


def fail_alone(place: str) -> tuple[str, str]:
    """The last stage fails in its second step, in one of its parts; what each rank is told."""
    is_broken = False

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if is_broken and place == "the loss":
            raise LookupError("the layer has lost its table")
        return functional.mse_loss(output, target)

    config = PipelineConfig(schedule="one_f_one_b", num_microbatches=2)
    model = nn.Sequential(nn.Linear(4, 4), Breaks())
    pipe = PipelineParallel(model, config, group=group_over(range(2)), loss_fn=loss_fn)
    batch = torch.ones(4, 4)
    pipe.step(batch, batch)
    is_broken = True
    for module in pipe.module.modules():
        if isinstance(module, Breaks):
            module.breaks_in = place
    try:
        pipe.step(batch, batch)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("place", ["forward", "the loss", "backward"])
def test_a_stage_that_fails_alone_ends_the_step_of_all(world: World, place: str) -> None:
    first, last = world.run(fail_alone, place, backend="torsh", timeout_s=15)
    assert last == ("LookupError", "the layer has lost its table")
    assert first[0] == "CommunicationError"
    assert "rank 1 ended the group: could not run stage 1 of the pipeline: LookupError" in first[1]


def normalised(kind: str) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8) if kind == "batch" else nn.Identity()
    wrap = {"spectral": spectral_norm, "old spectral": nn.utils.spectral_norm}.get(kind, lambda layer: layer)
    first, second, third = (wrap(nn.Linear(*sizes)) for sizes in ((4, 8), (8, 8), (8, 4)))
    return nn.Sequential(first, nn.ReLU(), second, norm, third)


def points() -> tuple[Tensor, Tensor]:
    values = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
    return values, values.flip(1)


def train_normalised(kind: str, num_microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    config = PipelineConfig(schedule="gpipe", num_microbatches=num_microbatches)
    pipe = PipelineParallel(normalised(kind), config, group=group, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.module.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(pipe.step(*points()).item())
        optimizer.step()
    return losses, dict(pipe.module.state_dict())


def train_normalised_all(cases: list[tuple[str, int]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train_normalised(*case) for case in cases]


def test_buffers_that_forward_changes_are_those_of_one_process(world: World) -> None:
    """Torch infers shapes by a forward on uninitialised memory, of which no statistic may keep anything."""
    cases = [("batch", 1), ("spectral", 4), ("old spectral", 4)]
    for results in world.run(train_normalised_all, cases, num_ranks=2, backend="torsh", timeout_s=60):
        for (kind, _), (losses, state) in zip(cases, results, strict=True):
            model = normalised(kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            expected = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = functional.mse_loss(model(points()[0]), points()[1])
                loss.backward()
                optimizer.step()
                expected.append(loss.item())
            assert losses == pytest.approx(expected, abs=1e-5), kind
            for name, value in state.items():
                torch.testing.assert_close(value, model.state_dict()[name], atol=1e-5, rtol=1e-4)


def what_is_missing() -> str:
    pipe, _ = make("gpt", "gpipe")
    with pytest.raises(AttributeError) as caught:
        _ = pipe.module.head if dist.get_rank() == 0 else pipe.module.token
    return str(caught.value)


def test_a_layer_of_another_rank_is_missing_in_words(world: World) -> None:
    for rank, name in enumerate(("head", "token")):
        assert f"no '{name}': under mesh.pp" in world.run(what_is_missing)[rank]
