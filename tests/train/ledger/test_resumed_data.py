"""Training that is interrupted goes on with the samples that are left, in batches of any size, of the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from tests.train.ledger.test_data_position import Counting
from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.ledger.audit import audit

NUM_SAMPLES = 40


class Printed(TensorDataset):
    """Data that know which they are."""

    fingerprint = "a7"


def points(num_samples: int = NUM_SAMPLES, kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    values = torch.arange(float(num_samples * 2)).reshape(num_samples, 2) / num_samples
    return kind(values, values.sum(dim=1, keepdim=True))


def start(folder: str, **training: Any) -> Engine:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    values = {
        "training": {"steps": 100, "seed": 5, **training},
        "checkpoint": {"enabled": True, "dir": folder, "every_steps": 1000},
    }
    engine = parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.01), Plan.from_dict(values), loss_fn=functional.mse_loss
    )
    engine.resume()
    return engine


def train(engine: Engine, loader: Any, until: int) -> list[float]:
    losses = []
    for batch in engine.batches(loader):
        losses.append(engine.step(batch))
        if engine.num_steps == until:
            break
    engine.save()
    engine.checkpoints.close()
    return losses


def in_three_sizes(folder: str, shuffle: bool, exactly_once: bool) -> tuple[list[int], list[float]]:
    """16 samples in batches of 8, 15 in batches of 5, and the other 9 in a batch of up to 12."""
    seen: list[events.SamplesEvent] = []
    events.subscribe(seen.append, events.SamplesEvent)  # type: ignore[arg-type]
    losses = []
    for until, batch_size in ((2, 8), (5, 5), (6, 12)):
        loader = DataLoader(points(), batch_size=batch_size, shuffle=shuffle)
        losses += train(start(folder, exactly_once=exactly_once), loader, until)
    assert all(not found.doubled for found in audit(seen))
    return [sample for event in seen for sample in event.ids], losses


def plain_losses() -> list[float]:
    """Of one process without this library."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = points().tensors
    losses = []
    for first, last in ((0, 8), (8, 16), (16, 21), (21, 26), (26, 31), (31, 40)):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs[first:last]), targets[first:last])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("shuffle", "exactly_once"), [(False, False), (True, True)])
def test_a_resumed_epoch_may_go_on_in_batches_of_another_size(
    world: World, tmp_path: Path, shuffle: bool, exactly_once: bool
) -> None:
    results = world.run(in_three_sizes, str(tmp_path), shuffle, exactly_once)
    assert sorted(sample for samples, _ in results for sample in samples) == list(range(NUM_SAMPLES))
    if not shuffle:
        for _, losses in results:
            assert losses == pytest.approx(plain_losses(), rel=1e-5)


def stream_in_two_sizes(folder: str) -> list[float]:
    """4 samples of a stream of 10 in a batch of 4, the others in batches of 3."""
    seen: list[float] = []
    for until, batch_size in ((1, 4), (3, 3)):
        engine = start(folder, exactly_once=True)
        data = DataLoader(
            Counting(), batch_size=batch_size, collate_fn=lambda rows: (_pair(torch.stack(rows)), torch.stack(rows))
        )
        for inputs, targets in engine.batches(data):
            engine.step((inputs, targets.float().unsqueeze(1)))
            seen += targets.tolist()
            if engine.num_steps == until:
                break
        engine.save()
        engine.checkpoints.close()
    return seen


def _pair(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, values], dim=1).float() / 10


def test_a_stream_goes_on_at_its_position_in_batches_of_another_size(world: World, tmp_path: Path) -> None:
    trained = world.run(stream_in_two_sizes, str(tmp_path))
    assert sorted(value for part in trained for value in part) == list(range(10))


def with_other_data(folder: str) -> list[str]:
    """Interrupted after 16 of 40 samples; then resumed with other data."""
    train(start(folder), DataLoader(points(kind=Printed), batch_size=8, shuffle=True), 2)

    def refused(data: TensorDataset, *, shuffle: bool = True, **training: Any) -> str:
        engine = start(folder, **training)
        try:
            with pytest.raises(InvalidArgument) as caught:
                next(engine.batches(DataLoader(data, batch_size=8, shuffle=shuffle)))
        finally:
            engine.checkpoints.close()
        return caught.value.message

    class Other(Printed):
        fingerprint = "b3"

    texts = [
        refused(points(41, Printed)),
        refused(points(kind=Other)),
        refused(points(kind=Printed), seed=6),
        refused(points(kind=Printed), shuffle=False),
    ]
    engine = start(folder)
    engine.ledger.next_epoch()
    next(engine.batches(DataLoader(points(41), batch_size=8)))  # another epoch may have other data
    engine.checkpoints.close()
    return texts


def test_other_data_in_mid_epoch_are_refused_with_what_differs(world: World, tmp_path: Path) -> None:
    for texts in world.run(with_other_data, str(tmp_path)):
        assert all(text.startswith("epoch 0 was interrupted after 16 samples") for text in texts)
        for text, difference in zip(
            texts,
            [
                "samples was 40 and is 41",
                "fingerprint was a7 and is b3",
                "order was RandomSampler, training.seed 5 and is RandomSampler, training.seed 6",
                "order was RandomSampler, training.seed 5 and is SequentialSampler",
            ],
            strict=True,
        ):
            assert text.endswith(f"these are other data: {difference}")


def from_an_old_state() -> list[int]:
    """The state of a version that counted batches: 2 of them are done."""
    seen: list[events.SamplesEvent] = []
    events.subscribe(seen.append, events.SamplesEvent)  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 1)
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01), Plan(), loss_fn=functional.mse_loss)
    state = engine.state_dict()
    del state["num_samples"], state["data"]
    state["num_batches"] = 2
    engine.load_state_dict(state)
    for batch in engine.batches(DataLoader(points(), batch_size=8), epochs=1):
        engine.step(batch)
    return [sample for event in seen for sample in event.ids]


def test_a_state_of_an_earlier_version_goes_on_by_batches(world: World) -> None:
    trained = world.run(from_an_old_state)
    assert sorted(sample for samples in trained for sample in samples) == list(range(16, NUM_SAMPLES))
