"""What a model's forward and its loss change in themselves: statistics of their own, a codebook, a count of calls.

In one process it sees every sample, once a step. Ranks see their own samples, and a step of several passes runs it
several times, so such state, and losses that depend on it, differ from one process: the first rank says so.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.parallel.models.kept_values import kept_values, roots_of
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.torch_internals import _BatchNorm

_log = logging.getLogger(__name__)


class ForwardState:
    """What a forward may change, as it is now."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._numbers = dict(_numbers(model))
        self._of_loss = dict(_numbers_of_loss(loss_fn))
        self._buffers = {name: buffer.clone() for name, buffer in _buffers(model)}
        self._versions = {name: param._version for name, param in _whole_params(model)}

    def changed_buffers(self) -> dict[str, Tensor]:
        """The buffers that have other values now, by name; those of batch norms too."""
        return {
            name: buffer
            for name, buffer in _buffers(self._model)
            if name in self._buffers and not torch.equal(buffer, self._buffers[name])
        }

    def changed(self) -> dict[str, float]:
        """A number for each buffer, parameter and attribute that is another now; batch norms have their own rules."""
        norms = {name for name, module in self._model.named_modules() if isinstance(module, _BatchNorm)}
        buffers = {
            name: _fingerprint(buffer)
            for name, buffer in self.changed_buffers().items()
            if name.rpartition(".")[0] not in norms
        }
        params = {
            name: _fingerprint(param)
            for name, param in _whole_params(self._model)
            if self._versions.get(name, param._version) != param._version
        }
        numbers = {name: one for name, one in _numbers(self._model) if self._numbers.get(name, one) != one}
        found = {plain_name(name): value for name, value in (buffers | params | numbers).items()}
        # One that a loss has made in this call counts: running means start with the first batch.
        of_loss = {name: one for name, one in _numbers_of_loss(self._loss_fn) if self._of_loss.get(name) != one}
        return found | of_loss


class ForwardChanges:
    """Watches the forwards of the first two updates, and warns of what all of them have changed.

    What only the first one changes is an initialisation, such as a table of positions.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_passes: int,
        asks_others: bool,
        loss_fn: Callable[..., Any] | None = None,
        has_stages: bool = False,
    ) -> None:
        """`has_stages`: each rank has modules that others have not."""
        self._loss_fn, self._has_stages = loss_fn, has_stages
        self._model, self._num_passes, self._asks_others = model, num_passes, asks_others
        self._changed: dict[str, float] | None = None
        """By all forwards so far, with the values after the last one."""
        self._num_updates = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward."""
        before = ForwardState(self._model, self._loss_fn)
        yield
        changed, seen = before.changed(), self._changed
        self._changed = changed if seen is None else {name: one for name, one in changed.items() if name in seen}

    def update_done(self) -> bool:
        """After an update: whether that was the last one to watch. Every rank calls this.

        Not after a forward: a rank that ran out of memory repeats its forwards, and others do not.
        """
        self._num_updates += 1
        if self._num_updates < 2:
            return False
        self._tell(self._changed or {})
        return True

    def _tell(self, mine: dict[str, float]) -> None:
        everyone = all_gather_object(mine) if self._asks_others else [mine]
        names = sorted({name for one in everyone for name in one})
        own = [name for name in names if len(self._values(name, everyone)) > 1]
        if process_group.rank() != 0 or not names:
            return
        if own:
            _log.warning(
                "%s changes in forward, and every rank has its own value, of its own samples: losses that depend on it"
                " differ from those of one process; compute it from the samples of all ranks (td.all_reduce in"
                " forward), or change it after the step",
                ", ".join(own[:3]),
            )
        elif self._num_passes > 1:
            _log.warning(
                "%s changes in every forward, and a step has %d of them: losses that depend on it differ from those of"
                " one pass; change it after the step, or set %s = 1",
                ", ".join(names[:3]),
                self._num_passes,
                "pipeline.num_microbatches and training.gradient_accumulation"
                if self._has_stages
                else "training.gradient_accumulation",
            )

    def _values(self, name: str, everyone: list[dict[str, float]]) -> set[str]:
        """The different values of the ranks. One that has not changed it has another, or has it in no stage."""
        having = [one for one in everyone if name in one] if self._has_stages else everyone
        return {_rounded(one.get(name, math.nan)) for one in having}


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in _own_modules(model):
        yield from ((f"{prefix}{name}", one) for name, one in module.named_buffers(recurse=False) if not one.is_meta)


def _whole_params(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters that are not shards: sharding writes those itself."""
    for prefix, module in _own_modules(model):
        for name, param in module.named_parameters(recurse=False):
            if not param.is_meta and not hasattr(param, "to_local"):
                yield f"{prefix}{name}", param


def _numbers(model: nn.Module) -> Iterator[tuple[str, float]]:
    for prefix, module in _own_modules(model):
        for name, value in vars(module).items():
            if (number := _number(value)) is not None:
                yield f"{prefix}{name}", number
    yield from _numbers_around(roots_of(model))


def _numbers_of_loss(loss_fn: Any) -> Iterator[tuple[str, float]]:
    """What a loss keeps between calls."""
    if isinstance(loss_fn, nn.Module):
        buffers = ((name, _fingerprint(one)) for name, one in loss_fn.named_buffers())
        found = itertools.chain(buffers, _numbers(loss_fn))
    else:
        found = _numbers_around([loss_fn])
    yield from ((f"the loss's {name}", number) for name, number in found)


def _numbers_around(roots: Iterable[Any]) -> Iterator[tuple[str, float]]:
    """Of the variables and lists that code has outside of modules."""
    for one in kept_values(roots):
        if (number := _number(one.value)) is not None:
            yield one.name, number


def _number(value: Any) -> float | None:
    """A number for an attribute that a forward may have changed; None for one that is not state."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, list | deque):
        return float(len(value))
    is_kept = isinstance(value, Tensor) and type(value) is Tensor and not value.requires_grad and not value.is_meta
    return _fingerprint(value) if is_kept else None


def _own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """With the start of their members' names: the user's; our own keep their state right under every plan."""
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("torsh_distributed."):
            yield f"{name}." if name else "", module


def _fingerprint(tensor: Tensor) -> float:
    """A number that two different tensors do not share, but for a rare chance."""
    values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    flat = values.double().flatten()
    return float(flat @ torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device))


def _rounded(value: float) -> str:
    """As text that is equal for numbers which differ by rounding only."""
    return f"{value:.5g}"
