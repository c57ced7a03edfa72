"""State that forward changes: said where ranks or passes would give it another value than one process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from tests.bed.world import World
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.probing import probing
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.comparing.forward_changes import ForwardState

ROWS, WIDTH = 8, 6


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.first(values).tanh())


class OwnStatistics(Network):
    """Subtracts a running mean that it keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(values.mean(0), 0.1)
        return super().forward(values - self.mean)


class Counting(Network):
    """Gets colder with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(values) / (1 + self.calls)


class Spectral(Network):
    """Follows the largest singular value by a step in every call."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.first)


class Caching(Network):
    """Keeps a table from its first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        if self.length < values.shape[1]:
            self.length = values.shape[1]
            self.table = torch.arange(WIDTH) / WIDTH
        return super().forward(values + self.table)


class Averaging(Network):
    """Follows its first layer with another that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)
        return super().forward(values + self.teacher(values))


def train(kind: type[nn.Module], plan: dict[str, Any]) -> str:
    """The warnings of three steps."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torsh_distributed")
    logger.addHandler(handler)
    try:
        torch.manual_seed(0)
        training = {"steps": 3, "batch_size": ROWS, **plan.get("training", {})}
        engine = parallelize(
            kind(), torch.optim.SGD, Plan(**{**plan, "training": training}), loss_fn=functional.mse_loss
        )
        batches = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 3)) for _ in range(3)]
        for batch in engine.batches(batches):
            engine.step(batch)
    finally:
        logger.removeHandler(handler)
    return "\n".join(said)


ACCUMULATED = {"training": {"gradient_accumulation": 2}}
SHARDED = {"mesh": {"shard": 2}}
PIPELINED = {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}}


def said_by_all() -> dict[str, str]:
    return {
        "statistics": train(OwnStatistics, {}),
        "statistics sharded": train(OwnStatistics, SHARDED),
        "counting": train(Counting, {}),
        "counting accumulated": train(Counting, ACCUMULATED),
        "counting in a pipeline": train(Counting, PIPELINED),
        "spectral norm in a pipeline": train(Spectral, PIPELINED),
        "nothing in a pipeline": train(Network, PIPELINED),
        "caching": train(Caching, ACCUMULATED),
        "averaging": train(Averaging, {}),
        "averaging accumulated": train(Averaging, ACCUMULATED),
        "nothing": train(Network, ACCUMULATED),
        "rank": str(process_group.rank()),
    }


@pytest.mark.ranks
def test_what_ranks_or_passes_change_for_themselves_is_said_once(world: World) -> None:
    said, others = world.run(said_by_all, num_ranks=2)
    assert "mean changes in forward, and every rank has its own value" in said["statistics"]
    assert "mean changes in forward, and every rank has its own value" in said["statistics sharded"]
    assert "calls changes in every forward, and a step has 2 of them" in said["counting accumulated"]
    assert "forward changes calls" in said["counting in a pipeline"]
    assert "and a step has 2 of them" in said["spectral norm in a pipeline"]
    assert "pipeline.num_microbatches" in said["spectral norm in a pipeline"]
    assert "teacher.weight changes in every forward, and a step has 2" in said["averaging accumulated"]
    for name in ("counting", "caching", "averaging", "nothing", "nothing in a pipeline"):
        assert "chang" not in said[name], said[name]
    assert not any(others[name] for name in said if name != "rank")


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH, **options)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.words(ids))


def refusals() -> list[str]:
    found = []
    for options, plan in (({"max_norm": 1.0}, {}), ({"scale_grad_by_freq": True}, {}), ({"max_norm": 1.0}, SHARDED)):
        with pytest.raises(ConfigurationError) as caught:
            parallelize(Words(**options), torch.optim.SGD, Plan(**plan), loss_fn=functional.mse_loss)
        found.append(str(caught.value))
    return found


@pytest.mark.ranks
def test_embeddings_that_look_at_the_whole_batch_are_refused(world: World) -> None:
    for norm, frequency, sharded in world.run(refusals, num_ranks=2):
        assert "words has max_norm" in norm
        assert "words has scale_grad_by_freq" in frequency
        assert "words has max_norm" in sharded


def test_what_a_forward_changes_is_found() -> None:
    for kind, name in ((OwnStatistics, "mean"), (Counting, "calls"), (Averaging, "teacher.weight")):
        model = kind()
        before = ForwardState(model)
        model(torch.randn(2, WIDTH))
        assert list(before.changed()) == [name]
    norm = nn.Sequential(nn.BatchNorm1d(WIDTH))
    before = ForwardState(norm)
    norm(torch.randn(4, WIDTH))
    assert before.changed() == {}
    assert set(before.changed_buffers()) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


class CentredLoss:
    """Subtracts a running mean of its own, which starts with the first batch."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean = outputs.detach().mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return functional.mse_loss(outputs - self.mean, targets)


class Remembering(nn.Module):
    """State in a plain tensor and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.seen = torch.zeros(WIDTH), []

    def forward(self, rows: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * rows.mean(0)
        self.seen.append(len(rows))
        return rows


def test_what_a_loss_keeps_and_what_is_no_buffer_is_found() -> None:
    loss = CentredLoss()
    before = ForwardState(nn.Identity(), loss)
    loss(torch.randn(3, WIDTH), torch.zeros(3, WIDTH))
    assert list(before.changed()) == ["the loss's mean"]
    model = Remembering()
    before = ForwardState(model)
    model(torch.randn(2, WIDTH))
    assert sorted(before.changed()) == ["centre", "seen"]


def test_looking_leaves_the_lists_of_a_model() -> None:
    model = Remembering()
    with probing(model):
        model(torch.randn(2, WIDTH))
    assert model.seen == []
    assert not model.centre.any()
