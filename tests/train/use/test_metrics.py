"""Metrics over ranks are those of one process, whatever the strategy."""

from __future__ import annotations

import functools
import pickle
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from tests.parallel.weights.checkpoints import gpt
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

PLANS: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 1, "shard": 2},
    {"dp": 1, "tp": 2},
    {"dp": 1, "pp": 2, "pipeline": {"num_microbatches": 1}},
]


class Merged:
    """A count of right answers, joined over ranks by merge_state."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(-1) == targets).sum())
        self.seen += targets.numel()

    def compute(self) -> float:
        return self.right / self.seen

    def merge_state(self, others: list[Self]) -> Self:
        for other in others:
            self.right += other.right
            self.seen += other.seen
        return self


class Lonely(Merged):
    merge_state = None  # type: ignore[assignment]


def most_likely(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.softmax(-1).amax(-1).mean()


def loader(num_samples: int = 7) -> DataLoader[Any]:
    """Batches of 4 and 3: the ranks' shares differ, and a batch of 1 leaves a rank without."""
    torch.manual_seed(2)
    ids = torch.randint(29, (num_samples, 13))
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4)


def metrics() -> dict[str, Any]:
    found: dict[str, Any] = {"merged": Merged(), "likely": most_likely}
    try:
        from torchmetrics import MeanMetric, Metric
    except ImportError:
        return found

    class Right(Metric):  # type: ignore[misc]  # untyped where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
            self.add_state("largest", [], dist_reduce_fx="cat")

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.right += (outputs.argmax(-1) == targets).sum()
            self.largest.append(outputs.amax().reshape(1))

        def compute(self) -> dict[str, Tensor]:
            return {
                "right": self.right,
                "largest": torch.cat(list(self.largest)).amax() if len(self.largest) else self.right,
            }

    assert MeanMetric
    return {**found, "right": Right()}


def evaluated(num_samples: int) -> list[dict[str, Any]]:
    out = []
    for plan in PLANS:
        engine = parallelize(
            gpt(), functools.partial(torch.optim.SGD, lr=0.1), Plan(**plan), loss_fn=next_character_loss
        )
        found = engine.evaluate(loader(num_samples), metrics=metrics())
        assert found["loss"] == pytest.approx(engine.evaluate(loader(num_samples)))
        out.append(found)
    return out


def test_metrics_are_those_of_one_process_on_every_axis(world: World) -> None:
    for num_samples in (7, 5):
        model, wanted = gpt().eval(), metrics()
        sums = torch.zeros(3, dtype=torch.float64)
        largest = []
        with torch.no_grad():
            for inputs, targets in loader(num_samples):
                outputs = model(inputs)
                wanted["merged"].update(outputs, targets)
                count = len(inputs)
                values = (next_character_loss(outputs, targets), most_likely(outputs, targets))
                sums += torch.tensor([float(values[0]) * count, float(values[1]) * count, count])
                largest.append(outputs.amax())
        for found in (one for results in world.run(evaluated, num_samples) for one in results):
            assert found["loss"] == pytest.approx(float(sums[0] / sums[2]), abs=1e-5)
            assert found["likely"] == pytest.approx(float(sums[1] / sums[2]), abs=1e-5)
            assert found["merged"] == pytest.approx(wanted["merged"].compute())
            if "right" in found:
                assert found["right"]["right"] == wanted["merged"].right
                assert found["right"]["largest"] == pytest.approx(float(max(largest)), abs=1e-5)


def refused() -> list[str]:
    engine = parallelize(gpt(), functools.partial(torch.optim.SGD, lr=0.1), Plan(dp=2), loss_fn=next_character_loss)
    texts = []
    for given in ({"lonely": Lonely()}, {"loss": most_likely}, {"number": 3}):
        with pytest.raises(InvalidArgument) as caught:
            engine.evaluate(loader(), metrics=given)
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_joined_is_refused(world: World) -> None:
    assert pickle.loads(pickle.dumps(Merged())).seen == 0
    for lonely, loss, number in world.run(refused):
        assert "lonely keeps a state that cannot be joined over ranks" in lonely
        assert "cannot be called loss" in loss
        assert "number has no update, compute, reset" in number
