"""What the tests call: every worker of a test imports it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torsh_distributed import rpc

WAIT_S = 30.0
gates: dict[str, threading.Event] = {}
"""Events by name, for tests whose workers share a process."""
seen: list[Any] = []


@rpc.expose
def add(left: Any, right: Any) -> Any:
    return left + right


@rpc.expose(inline=True)
def echo(value: Any) -> Any:
    return value


@rpc.expose
def echo_on_a_thread(value: Any) -> Any:
    return value


@rpc.expose
def fail(kind: str) -> None:
    raise {"value": ValueError, "key": KeyError, "own": OwnError}[kind](f"a {kind} error")


class OwnError(Exception):
    """Of the callee alone."""


@rpc.expose
def wait_for_gate(name: str) -> str:
    gates[name].wait(WAIT_S)
    return name


@rpc.expose(most_at_once=2)
def wait_limited(name: str) -> str:
    seen.append(name)
    gates[name].wait(WAIT_S)
    return name


@rpc.expose
def wait_until_cancelled() -> None:
    call = rpc.current_call()
    assert call is not None
    call.on_cancel(gates["cancelled"].set)
    gates["begun"].set()
    gates["cancelled"].wait(WAIT_S)


@rpc.expose
def remaining_s() -> float:
    call = rpc.current_call()
    assert call is not None
    return call.remaining_s


@rpc.expose
def remaining_s_of_a_call_further_on(name: str) -> float:
    return float(rpc.call(name, remaining_s))


@rpc.expose
def count_to(number: int) -> Iterator[int]:
    try:
        for value in range(number):
            seen.append(value)
            yield value
    finally:
        seen.append("closed")


@rpc.expose
def fail_after(number: int) -> Iterator[int]:
    yield from range(number)
    raise ValueError("no more")


later: list[Future[Any]] = []


@rpc.expose
def answer_later() -> Future[Any]:
    later.append(Future())
    return later[-1]


@rpc.expose
def ones(num_bytes: int) -> Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


@rpc.expose
def what_cannot_travel() -> Any:
    return {"inner": [object()]}


@rpc.expose(inline=True)
def misbehave_inline(how: str) -> Any:
    if how == "raise":
        raise ValueError("inline")
    if how == "later":
        later.append(Future())
        return later[-1]
    return [object()] if how == "list" else object()


def not_exposed() -> None:
    seen.append("called")


@rpc.sendable
@dataclass
class Point:
    """A dataclass that travels."""

    x: int
    values: Tensor


@rpc.expose
class Counter:
    """An object that stays at its owner."""

    def __init__(self, value: int = 0) -> None:
        if value < 0:
            raise ValueError("a counter begins at 0 or above")
        self.value = value

    def increase(self, by: int = 1) -> int:
        self.value += by
        return self.value

    def _secret(self) -> int:
        return self.value


class HiddenThing:
    """Its class is not exposed."""

    def shout(self) -> str:
        return "!"


@rpc.expose
def make_hidden_thing() -> HiddenThing:
    return HiddenThing()


@rpc.expose
def increase_through(reference: Any) -> int:
    return int(reference.call("increase", (10,)))


kept: list[Any] = []


@rpc.expose
def keep(value: Any) -> None:
    kept.append(value)


@rpc.expose
def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds
