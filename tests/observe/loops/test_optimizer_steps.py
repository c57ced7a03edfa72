from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.events import step_notes
from torsh_distributed.observe.loops.optimizer_steps import OptimizerSteps, StepSampling
from torsh_distributed.observe.metrics.rank_collector import RankCollector
from torsh_distributed.observe.metrics.step_record import StepRecord


def test_a_plain_loop_emits_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_notes, "_has_engine", False)
    seen: list[events.Event] = []
    unsubscribe = events.subscribe(seen.append)
    steps = OptimizerSteps()
    try:
        steps.install()
        model = torch.nn.Linear(2, 2)
        first = torch.optim.SGD(model.parameters(), lr=0.5)
        second = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            first.step()
            second.step()
    finally:
        steps.remove()
        unsubscribe()
    found = [event for event in seen if isinstance(event, events.StepEvent)]
    assert [event.step for event in found] == [1, 2, 3], "the second optimizer of a loop makes no steps"
    assert {event.learning_rate for event in found} == {0.5}
    phases = [event.phase for event in seen if isinstance(event, events.PhaseEvent)]
    assert phases.count("optimizer") == 6
    assert (phases.count("forward"), phases.count("backward")) == (2, 2), "known from the second step on"
    assert [event.num_samples for event in found] == [None, 2, 2]
    first.step()
    assert len([event for event in seen if isinstance(event, events.StepEvent)]) == 3, "removed"


def test_the_engine_tells_of_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_notes, "_has_engine", True)
    seen: list[events.Event] = []
    unsubscribe = events.subscribe(seen.append)
    steps = OptimizerSteps()
    try:
        steps.install()
        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.sum().backward()
        optimizer.step()
    finally:
        steps.remove()
        unsubscribe()
    assert seen == []


@pytest.mark.parametrize(
    ("step_s", "chosen"), [(0.8, [5, 6, 7, 8]), (0.03, [11, 32, 64, 96]), (0.001, [11, 101, 256, 512])]
)
def test_short_steps_are_looked_at_more_rarely(step_s: float, chosen: list[int]) -> None:
    sampling = StepSampling()
    sampling.add(3, 10.0)
    sampling.add(4, 10.0 + step_s)
    found = [4]
    for _ in chosen:
        found.append(sampling.next_step(found[-1]))
    assert found[1:] == chosen


def test_the_first_steps_are_all_looked_at() -> None:
    sampling = StepSampling()
    found = [1]
    for _ in range(3):
        sampling.add(found[-1], 0.001 * found[-1])
        found.append(sampling.next_step(found[-1]))
    assert found == [1, 2, 3, 4]


def train_with_a_slow_rank(num_steps: int, late_s: float) -> list[StepRecord]:
    """Runs on every rank: rank 1 is late in every step, and most steps are not looked at."""
    collector = RankCollector().attach()
    steps = OptimizerSteps(on_averaged_group=collector.note_averaged_group)
    steps.install()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        if dist.get_rank() == 1:
            time.sleep(late_s)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    steps.remove()
    collector.detach()
    collector.fold()
    return list(collector.steps)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_ddp_waits_for_is_known_of_steps_that_are_not_looked_at(world: World, backend: str) -> None:
    quick, slow = world.run(train_with_a_slow_rank, 30, 0.03, num_ranks=2, backend=backend)
    assert [one.step for one in quick] == list(range(1, 31))
    is_split = [one.forward_s is not None for one in quick]
    # Our recorder does not see operations of gloo: only hooks know what DDP waits for there.
    assert all(is_split[2:]) if backend == "gloo" else sum(is_split) < 15
    assert [one.optimizer_s is not None for one in quick][2:] == is_split[2:]
    waits = [
        [one.wait_s for one in steps[4:] if one.wait_s is not None and (backend == "gloo" or one.forward_s is None)]
        for steps in (quick, slow)
    ]
    assert min(len(one) for one in waits) > 10
    assert statistics.median(waits[0]) > 0.01, "the quick rank waits for the slow one"
    assert statistics.median(waits[0]) > 2 * statistics.median(waits[1])
    assert statistics.median(one.busy_s for one in slow) > statistics.median(one.busy_s for one in quick)
    for one in quick[1:] + slow[1:]:  # nothing says when the first one began
        known = (one.forward_s, one.backward_s, one.optimizer_s, one.wait_s, one.data_s, one.other_s)
        assert sum(part or 0.0 for part in known) == pytest.approx(one.step_s)
