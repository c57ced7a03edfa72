from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch
from torch import nn

from torsh_distributed.parallel.models.kept_values import KeptValues, kept_values
from torsh_distributed.parallel.models.probing import probing

COUNT = 0
HISTORY: list[int] = []


def _inner() -> int:
    global COUNT
    COUNT += 1
    HISTORY.append(COUNT)
    return COUNT


def _of_globals() -> int:
    return _inner()


def _of_closure() -> Any:
    number, counts, running = 0, {"calls": [0]}, torch.zeros(2)

    def call() -> tuple[int, int, float]:
        nonlocal number
        number += 1
        counts["calls"][0] += 1
        running.add_(1)
        return number, counts["calls"][0], float(running.sum())

    return call


def _of_default() -> Any:
    def call(last: deque[int] = deque([0], maxlen=2)) -> int:  # noqa: B006
        last.append(last[-1] + 1)
        return last[-1]

    return call


class _Ramp:
    def __init__(self) -> None:
        self.num_calls, self.mean = 0, None

    def __call__(self, step: int = 1) -> tuple[int, float]:
        self.num_calls += step
        self.mean = torch.ones(()) if self.mean is None else self.mean + 1
        return self.num_calls, float(self.mean)


def _of_attribute() -> Any:
    def call() -> int:
        call.calls += 1  # type: ignore[attr-defined]
        return call.calls  # type: ignore[attr-defined]

    call.calls = 0  # type: ignore[attr-defined]
    return call


def test_calls_that_look_leave_what_code_keeps_as_it_was() -> None:
    ramp = _Ramp()
    for code in (
        _of_globals,
        _of_closure(),
        _of_default(),
        _of_attribute(),
        ramp,
        functools.partial(ramp, 2),
        _Ramp().__call__,
        lambda: ramp(3),
    ):
        code()
        kept = KeptValues([code])
        first = code()
        code()
        kept.restore()
        assert code() == first, code


def test_libraries_and_long_lists_are_not_followed() -> None:
    data = list(range(1000))
    layer = nn.Linear(2, 2)

    def call() -> Any:
        return torch.relu(layer(torch.tensor(data[:2], dtype=torch.float32)))

    names = [one.name for one in kept_values([call])]
    assert set(names) == {"data", "layer"}


def test_a_forward_that_looks_leaves_variables_around_it() -> None:
    counts = [0]

    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts[0] += 1
            return x * counts[0]

    model = nn.Sequential(nn.Identity(), Counting())
    model[0].register_forward_hook(lambda *_: counts.append(1))
    with probing(model):
        model(torch.ones(1))
    assert counts == [0]
