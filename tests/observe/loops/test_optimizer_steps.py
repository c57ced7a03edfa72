from __future__ import annotations

import sys

import pytest
import torch

from torsh_distributed import events
from torsh_distributed.observe.loops.optimizer_steps import OptimizerSteps


def test_a_plain_loop_emits_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torsh_distributed.train.engine", raising=False)
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
    monkeypatch.setitem(sys.modules, "torsh_distributed.train.engine", torch)
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
