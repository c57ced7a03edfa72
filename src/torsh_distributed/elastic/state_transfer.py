"""The state of training from one rank to all that do not have it, over the group they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torsh_distributed.checkpoint.random_generators import reseed
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.groups import process_group

if TYPE_CHECKING:
    from torsh_distributed.train.engine import Engine


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """How far a rank has come."""

    num_updates: int
    """Updates done or skipped; -1 in a rank that has no state yet."""
    averaged: Sequence[int] | None = None
    """Of a rank that has kept its gradients of the step in progress: the buckets of them that are averaged."""
    is_new: bool = False
    """Whether the rank joins now."""


def source_of(ranks: Sequence[RankProgress]) -> int:
    """The rank that has come farthest, of those that were here before; the lowest of them."""
    farthest = max(rank.num_updates for rank in ranks if not rank.is_new)
    return next(number for number, rank in enumerate(ranks) if not rank.is_new and rank.num_updates == farthest)


def sources_of(ranks: Sequence[RankProgress]) -> dict[int, int] | None:
    """For each bucket that some rank has averaged the lowest that has; None unless all keep gradients of one step."""
    if len({rank.num_updates for rank in ranks}) > 1 or any(rank.averaged is None for rank in ranks):
        return None
    found: dict[int, int] = {}
    for number, rank in enumerate(ranks):
        for bucket in rank.averaged or ():
            found.setdefault(bucket, number)
    return found


def send_state(engine: Engine, source: int, *, is_needed: bool, is_new: bool, facts: dict[str, Any]) -> dict[str, Any]:
    """Take the state of rank `source`, on ranks where it `is_needed`; every rank of the world calls this.

    Returns the source's `facts`. A rank that `is_new` takes its place in the data and draws its own random numbers;
    one that is only behind keeps both.
    """
    is_source = process_group.rank() == source
    state: dict[str, Any] = engine.strategy.whole_state(engine.optimizer) if is_source else {}
    tensors: list[Tensor] = []
    outline = outline_of(state, tensors)
    told = broadcast_object(
        {
            "outline": outline,
            "shapes": [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors],
            **_numbers(engine),
            "facts": facts,
        }
        if is_source
        else None,
        source,
    )
    device = next(engine.unwrapped.parameters()).device
    received = []
    for number, (shape, dtype) in enumerate(told["shapes"]):
        mine = (
            tensors[number].detach().to(device)
            if is_source
            else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        )
        received.append(broadcast(mine.contiguous(), source))
    if is_needed:
        engine.strategy.load_whole_state(engine.optimizer, filled(told["outline"], received))
        _load_numbers(engine, told, is_new=is_new)
    told_facts: dict[str, Any] = told["facts"]
    return told_facts


def send_rest(engine: Engine, source: int, *, is_new: bool, facts: dict[str, Any]) -> dict[str, Any]:
    """What a rank that `is_new` lacks if it has parameters and optimizer state already; every rank calls this.

    Buffers, and numbers. Returns the source's `facts`.
    """
    told = broadcast_object({**_numbers(engine), "facts": facts}, source)
    for buffer in engine.unwrapped.buffers():
        sent = broadcast(buffer.detach().contiguous(), source)
        if is_new:
            buffer.detach().copy_(sent)
    if is_new:
        _load_numbers(engine, told, is_new=True)
    told_facts: dict[str, Any] = told["facts"]
    return told_facts


def _numbers(engine: Engine) -> dict[str, Any]:
    return {
        "precision": engine.precision.state_dict(),
        "learning_rate": engine.learning_rate.state_dict(),
        "num_steps": engine.num_steps,
        "num_skipped": engine.num_skipped,
    }


def _load_numbers(engine: Engine, told: dict[str, Any], *, is_new: bool) -> None:
    engine.precision.load_state_dict(told["precision"])
    engine.learning_rate.load_state_dict(told["learning_rate"], data_degree=process_group.world_size())
    engine.num_steps, engine.num_skipped = told["num_steps"], told["num_skipped"]
    if is_new:
        reseed(engine.plan.training.seed + engine.num_steps + process_group.rank())


_TENSOR = "__tensor__"


def outline_of(value: Any, tensors: list[Tensor]) -> Any:
    """The nesting of `value` with each tensor replaced by its number in `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, dict):
        return {key: outline_of(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(outline_of(inner, tensors) for inner in value)
    return value


def filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The value of that outline."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: filled(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(inner, tensors) for inner in value)
    return value
