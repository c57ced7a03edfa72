"""Layers that pass tuples on, as Megatron's do, train in stages as they do in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.real_deepspeed import use_deepspeed
from tests.bed.world import World
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from torsh_distributed.errors import InvalidArgument

WIDTH, LENGTH, VOCABULARY, STEPS, GAS, MICRO, NUM_BLOCKS = 8, 5, 11, 4, 4, 2, 4
Values = tuple[Tensor, ...]


class Embed(nn.Module):
    """Makes what the blocks pass on: hidden state, boolean mask, integer positions, and a second trained state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, inputs: Values) -> Values:
        ids, mask = inputs
        hidden = self.table(ids)
        return hidden, mask, torch.arange(LENGTH, device=ids.device), hidden.mean(dim=1)


class Block(nn.Module):
    """Attention under the mask, with a table of positions that later stages look up in their own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, inputs: Values) -> Values:
        hidden, mask, positions, summary = inputs
        placed = hidden + self.places(positions)
        scores = self.query(placed) @ placed.transpose(1, 2)
        attended = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ self.value(hidden)
        return hidden + attended + summary[:, None], mask, positions, summary.tanh()


class Head(nn.Module):
    """Uses the hidden state alone: the other trained state gets no gradient from here."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Values) -> Tensor:
        return self.linear(inputs[0])


LAYERS: Sequence[type[nn.Module]] = (Embed, *[Block] * NUM_BLOCKS, Head)


def masked_loss(logits: Tensor, targets: Values) -> Tensor:
    labels, counted = targets
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * counted.flatten()).sum() / counted.sum()


def ignoring_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def microbatches(replica: int, *, is_pair: bool = True) -> list[tuple[Values, Any]]:
    """Their masks have no row for each sample and differ, and they have different numbers of counted labels."""
    generator = torch.Generator().manual_seed(90 + replica)
    found: list[tuple[Values, Any]] = []
    for number in range(STEPS * GAS):
        ids = torch.randint(VOCABULARY, (MICRO, LENGTH), generator=generator)
        mask = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril(number % 3)
        counted = torch.rand(MICRO, LENGTH, generator=generator) < 0.2 + 0.2 * (number % 4)
        counted[0, 0] = True
        labels = ids.roll(1, dims=1)
        found.append(((ids, mask), (labels, counted.float()) if is_pair else labels.masked_fill(~counted, -100)))
    return found


def config(**sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GAS,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **sections,
    }


def train(deepspeed: Any, num_stages: int, *, is_pair: bool = True, **options: Any) -> tuple[list[float], float]:
    """Losses of whole batches and of evaluating one; runs on ranks."""
    sections = options.pop("sections", {})
    net = deepspeed.PipelineModule(
        layers=[deepspeed.LayerSpec(layer) for layer in LAYERS],
        num_stages=num_stages,
        loss_fn=masked_loss if is_pair else ignoring_loss,
        partition_method="uniform",
        seed_layers=True,
        base_seed=7,
        **options,
    )
    optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=0.02, foreach=False)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config(**sections))
    found = microbatches(engine.grid.get_data_parallel_id(), is_pair=is_pair)
    data = iter(found)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    return losses, float(engine.eval_batch(iter(found[:GAS])))


def ours(num_stages: int, options: dict[str, Any]) -> tuple[list[float], float]:
    from torsh_distributed.migrate import deepspeed

    return train(deepspeed, num_stages, **options)


def built() -> nn.Sequential:
    layers = []
    for index, layer in enumerate(LAYERS):
        torch.manual_seed(7 + index)
        layers.append(layer())
    return nn.Sequential(*layers)


def one_process(num_replicas: int = 1, *, is_pair: bool = True) -> tuple[list[float], float]:
    """The same by torch alone: the loss is the mean of the microbatches' losses."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loss_fn: Any = masked_loss if is_pair else ignoring_loss
    data = [microbatches(replica, is_pair=is_pair) for replica in range(num_replicas)]

    def mean_of(step: int) -> Tensor:
        parts = [one for found in data for one in found[step * GAS : (step + 1) * GAS]]
        return torch.stack([loss_fn(model(inputs), targets) for inputs, targets in parts]).mean()

    losses = []
    for step in range(STEPS):
        loss = mean_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, float(mean_of(0))


def check(world: World, num_stages: int, num_ranks: int, *, rel: float = 1e-5, **options: Any) -> None:
    losses, evaluated = one_process(num_ranks // num_stages, is_pair=options.get("is_pair", True))
    for found, value in world.run(ours, num_stages, options, num_ranks=num_ranks, backend="torsh", timeout_s=90):
        assert found == pytest.approx(losses, rel=rel)
        assert value == pytest.approx(evaluated, rel=rel)


def test_two_stages_train_as_one_process_does(world: World) -> None:
    check(world, 2, 2)


def test_labels_that_do_not_count_weigh_microbatches_as_deepspeed_does(world: World) -> None:
    check(world, 2, 2, is_pair=False)


def test_one_stage_on_two_replicas_trains_as_one_process_does(world: World) -> None:
    check(world, 1, 2)


def test_recomputed_layers_get_the_whole_tuple(world: World) -> None:
    check(world, 2, 2, activation_checkpoint_interval=1)


@pytest.mark.matrix
@pytest.mark.parametrize(("num_stages", "num_ranks", "stage"), [(4, 4, 0), (3, 3, 0), (2, 4, 0), (2, 4, 1)])
def test_more_stages_and_replicas_train_as_one_process_does(
    world: World, num_stages: int, num_ranks: int, stage: int
) -> None:
    check(world, num_stages, num_ranks, sections={"zero_optimization": {"stage": stage}})


def outputs_of_stages() -> list[Any]:
    from torsh_distributed.migrate import deepspeed

    net = deepspeed.PipelineModule(
        layers=[deepspeed.LayerSpec(layer) for layer in LAYERS],
        num_stages=2,
        loss_fn=masked_loss,
        seed_layers=True,
        base_seed=7,
    )
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config())
    loss, logits = engine.eval_batch(iter(microbatches(0)), return_logits=True)
    return [float(loss), logits]


def test_evaluating_returns_the_outputs_of_all_microbatches(world: World) -> None:
    model, data = built(), microbatches(0)[:GAS]
    with torch.no_grad():
        wanted = [model(inputs) for inputs, _ in data]
        losses = [masked_loss(logits, targets) for logits, (_, targets) in zip(wanted, data, strict=True)]
    for loss, logits in world.run(outputs_of_stages, num_ranks=2, backend="torsh", timeout_s=60):
        torch.testing.assert_close(logits, torch.cat(wanted))
        assert loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


class Alone(nn.Module):
    """A layer that returns a tuple of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> tuple[Tensor]:
        return (self.linear(inputs),)


def a_tuple_of_one() -> str:
    from torsh_distributed.migrate import deepspeed

    net = deepspeed.PipelineModule([Alone(), nn.Linear(WIDTH, 1)], num_stages=2, loss_fn=functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config())
    with pytest.raises(Exception, match="stage") as caught:
        engine.train_batch(iter([(torch.ones(MICRO, WIDTH), torch.ones(MICRO, 1))] * GAS))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_cannot_be_sent_is_refused_with_what_to_do(world: World) -> None:
    first, second = world.run(a_tuple_of_one, num_ranks=2, backend="torsh", timeout_s=60)
    assert InvalidArgument.__name__ in first
    assert "the last layer of a stage returns a tuple of Tensor" in first
    assert "the last layer of a stage returns a tuple of Tensor" in second


def theirs(options: dict[str, Any]) -> tuple[list[float], float]:
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    deepspeed = use_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.LayerSpec = __import__("deepspeed.pipe", fromlist=["LayerSpec"]).LayerSpec
    return train(deepspeed, 2, **options)


@pytest.mark.needs_deepspeed
@pytest.mark.matrix
@pytest.mark.parametrize("is_pair", [True, False])
def test_tuples_train_as_with_deepspeed(world: World, deepspeed_world: DeepSpeedWorld, is_pair: bool) -> None:
    found = deepspeed_world.run_theirs(theirs, {"is_pair": is_pair}, timeout_s=110)
    mine = world.run(ours, 2, {"is_pair": is_pair}, num_ranks=2, backend="torsh", timeout_s=60)
    for (losses, evaluated), (other, other_evaluated) in zip(mine, found, strict=True):
        assert losses == pytest.approx(other, rel=1e-5)
        assert evaluated == pytest.approx(other_evaluated, rel=1e-5)
