"""Metrics over ranks are those of one process, whatever the strategy."""

from __future__ import annotations

import functools
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
    {"dp": 1, "pp": 2, "pipeline": {"num_microbatches": 2}},
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

    def state_dict(self) -> dict[str, int]:
        return {"right": self.right, "seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.right, self.seen = state["right"], state["seen"]

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
    from torchmetrics import Metric

    class Right(Metric):  # type: ignore[misc]  # optional
        def __init__(self) -> None:
            super().__init__()
            self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
            self.add_state("largest", [], dist_reduce_fx="cat")

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.right += (outputs.argmax(-1) == targets).sum()
            self.largest.append(outputs.amax().reshape(1))

        def compute(self) -> dict[str, Tensor]:
            largest = self.largest if isinstance(self.largest, Tensor) else torch.cat(self.largest)
            return {"right": self.right, "largest": largest.amax()}

    return {"merged": Merged(), "likely": most_likely, "right": Right()}


def evaluated() -> list[tuple[int, dict[str, Any]]]:
    out = []
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    for plan in PLANS:
        engine = parallelize(gpt(), sgd, Plan(**plan), loss_fn=next_character_loss)
        for num_samples in (7, 5) if plan is PLANS[0] else (5,):
            found = engine.evaluate(loader(num_samples), metrics=metrics())
            assert found["loss"] == pytest.approx(engine.evaluate(loader(num_samples)))
            out.append((num_samples, found))
    return out


def alone(num_samples: int) -> dict[str, Any]:
    model, merged = gpt().eval(), Merged()
    sums, largest = torch.zeros(3, dtype=torch.float64), []
    with torch.no_grad():
        for inputs, targets in loader(num_samples):
            outputs = model(inputs)
            merged.update(outputs, targets)
            values = (next_character_loss(outputs, targets), most_likely(outputs, targets))
            sums += torch.tensor([float(one) for one in (*values, 1)]) * len(inputs)
            largest.append(float(outputs.amax()))
    loss, likely, count = sums.tolist()
    right = {"right": merged.right, "largest": pytest.approx(max(largest), abs=1e-5)}
    return {"loss": loss / count, "likely": likely / count, "merged": merged.compute(), "right": right}


@pytest.mark.needs_library("torchmetrics")
def test_metrics_are_those_of_one_process_on_every_axis(world: World) -> None:
    for results in world.run(evaluated, timeout_s=100):
        for num_samples, found in results:
            wanted = alone(num_samples)
            assert found["right"] == wanted.pop("right")
            assert found == {**found, **{name: pytest.approx(value, abs=1e-5) for name, value in wanted.items()}}


def refused() -> list[str]:
    engine = parallelize(gpt(), functools.partial(torch.optim.SGD, lr=0.1), Plan(dp=2), loss_fn=next_character_loss)
    texts = []
    for given in ({"lonely": Lonely()}, {"loss": most_likely}, {"number": 3}):
        with pytest.raises(InvalidArgument) as caught:
            engine.evaluate(loader(), metrics=given)
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_joined_is_refused(world: World) -> None:
    for lonely, loss, number in world.run(refused):
        assert "lonely keeps a state that cannot be joined over ranks" in lonely
        assert "cannot be called loss" in loss
        assert "number has no update, compute, reset" in number
