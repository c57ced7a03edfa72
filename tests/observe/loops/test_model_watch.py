"""What is seen of a loop that says nothing itself, beside what is known of it."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from torsh_distributed import events
from torsh_distributed.events import step_notes
from torsh_distributed.observe.loops.counted_operations import CountedOperations
from torsh_distributed.observe.loops.optimizer_steps import OptimizerSteps
from torsh_distributed.observe.metrics.rank_collector import RankCollector


class Watched:
    """A loop under observation: its events, its counts, and the collector that takes both."""

    def __init__(self) -> None:
        self.seen: list[events.Event] = []
        self.counts: list[int] = []
        self.collector = RankCollector().attach()
        self._unsubscribe = events.subscribe(self.seen.append)
        self.steps = OptimizerSteps(self._note)
        self.steps.install()

    def _note(self, num_flops: int, peak: float | None) -> None:
        self.counts.append(num_flops)
        self.collector.note_operations(num_flops, 1e12)

    def close(self) -> None:
        self.steps.remove()
        self._unsubscribe()
        self.collector.detach()

    def phases(self) -> list[str]:
        return [event.phase for event in self.seen if isinstance(event, events.PhaseEvent)]

    def losses(self) -> list[float | None]:
        return [event.loss for event in self.seen if isinstance(event, events.StepEvent)]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(step_notes, "_has_engine", False)
    monkeypatch.setattr("torsh_distributed.observe.loops.model_watch._compiles", lambda: False)
    watched = Watched()
    yield watched
    watched.close()


def model_of_two() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def test_forward_backward_batches_loss_and_operations_of_a_plain_loop(watched: Watched) -> None:
    model, criterion = model_of_two(), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in DataLoader(torch.ones(24, 8), batch_size=4):  # type: ignore[arg-type]  # a tensor is a dataset too
        loss = criterion(model(batch), torch.zeros(4, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert watched.losses()[1:] == losses[1:], "from the second step on"
    phases = watched.phases()
    assert phases.count("data") == 6
    assert phases.count("backward") == 5
    # Products of 4 rows: forward of both layers, both weights' gradients, and the input's of the second alone.
    assert watched.counts == [2 * 4 * (8 * 16 * 2 + 16 * 4 * 3)]
    watched.collector.fold()
    last = watched.collector.steps[-1]
    assert last.forward_s is not None
    assert last.backward_s is not None
    assert last.data_s is not None
    assert last.num_samples == 4
    metrics = watched.collector.metrics
    rate = metrics("torsh_flops_per_second").value
    assert rate is not None
    assert metrics("torsh_mfu_ratio").value == pytest.approx(rate / 1e12)


def test_counting_agrees_with_torchs_counter_of_forward_and_backward() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Flatten(0, 1), torch.nn.Linear(16, 8))
    batch = torch.randn(2, 5, 16, requires_grad=True)
    with CountedOperations() as ours:
        model(batch)
    with FlopCounterMode(display=False) as theirs:
        model(batch).sum().backward()
    with CountedOperations() as attention:
        query = torch.randn(2, 2, 5, 8, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert ours.num_flops == theirs.get_total_flops()
    # Fused attention, which torch does not count on the CPU: forward and twice as much for backward.
    assert attention.num_flops == 3 * 2 * (2 * 2 * 5 * 5 * 8) * 2


def test_frozen_weights_take_no_gradient_and_evaluation_is_no_step(watched: Watched) -> None:
    model = model_of_two()
    model[0].requires_grad_(False)  # type: ignore[index]  # a Sequential
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(64, 8))
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert watched.counts == [2 * 4 * (8 * 16 + 16 * 4 * 2)]


def test_an_exception_in_forward_leaves_nothing_behind(watched: Watched) -> None:
    class Fails(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.fails = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(batch)
            if self.fails:
                raise ValueError("a broken batch")
            return out

    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(12):
        model.fails = number in (1, 10)  # the step of looking, and one of counting
        if model.fails:
            with pytest.raises(ValueError, match="a broken batch"):
                model(torch.ones(1, 2))
            model.fails = False
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert not torch.nn.modules.module._global_forward_hooks
    assert len(watched.counts) == 2


def test_copies_and_files_of_the_model_do_not_need_this_library(watched: Watched) -> None:
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    assert model._forward_hooks, "it is watched"
    num_seen = len(watched.phases())
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"torsh_distributed" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for one in (twin, loaded):
        assert torch.equal(one(torch.ones(1, 8)), model(torch.ones(1, 8)))
    assert len(watched.phases()) == num_seen + 2, "only the model itself is seen"
    watched.steps.remove()
    assert not model._forward_hooks


def test_other_threads_are_not_the_loop(watched: Watched) -> None:
    model = model_of_two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        thread = threading.Thread(target=lambda: model(torch.ones(32, 8)))
        thread.start()
        thread.join()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert watched.counts == [2 * 4 * (8 * 16 * 2 + 16 * 4 * 3)]
    assert watched.phases().count("forward") == 3
