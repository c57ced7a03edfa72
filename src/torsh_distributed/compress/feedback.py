"""Error feedback: how the part of a gradient that compression left out is compensated.

`x` is always flat, fp32, and laid out by name. `prepare` returns what to send; `accept` takes what was sent and its
mean, and returns the gradient to train with. A step that will not be finished must not be prepared. Buffers are kept
from step to step, because allocating costs more than the arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.messages.sparse import Vector, add_to
from torsh_distributed.compress.named_buffers import FlatLayout, NamedBuffers, split
from torsh_distributed.plan import CompressConfig


class Feedback(ABC):
    """What a rank remembers of earlier gradients to correct the next one."""

    is_shared = False
    """Whether ranks keep state that must match on all of them."""

    @abstractmethod
    def prepare(self, layout: FlatLayout, gradients: Sequence[Tensor]) -> Tensor:
        """What to send for these finite gradients: a buffer that is in use until `accept`."""

    @abstractmethod
    def accept(self, layout: FlatLayout, x: Tensor, sent: Vector, mean: Vector) -> Vector:
        """The averaged gradient, after `x` of `prepare` was sent as `sent`; `mean` is the mean of all ranks' `sent`."""

    def abandon(self, layout: FlatLayout) -> None:  # noqa: B027 (nothing to forget without memory)
        """What was prepared did not arrive: it is lost, with the residual in it."""

    @abstractmethod
    def carried(self, layout: FlatLayout, device: torch.device) -> Tensor | None:
        """What to add to a gradient that travels uncompressed; None if there is nothing to add."""

    @abstractmethod
    def accept_dense(self, layout: FlatLayout, gradient: Tensor, mean: Tensor) -> None:
        """The whole gradient, with what was carried, was sent uncompressed."""

    def rescale(self, factor: float) -> None:  # noqa: B027 (nothing to change without memory)
        """Gradients are `factor` times as large from now on: scale what is remembered."""

    def reset(self, names: Iterable[str] | None = None) -> None:  # noqa: B027 (nothing to forget without memory)
        """Forget everything, or what is kept for some names."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart; each rank has its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, is_own: bool) -> None:  # noqa: B027 (as `reset`)
        """Continue from `state_dict()`; `is_own` says whether this rank saved it, in a group of the same size."""


class NoFeedback(Feedback):
    """What is left out is lost."""

    def __init__(self) -> None:
        self._buffers = NamedBuffers()

    @override
    def prepare(self, layout: FlatLayout, gradients: Sequence[Tensor]) -> Tensor:
        x = self._buffers.flat(layout, gradients[0].device)
        for gradient, part in _beside(gradients, x, layout):
            part.copy_(gradient)
        return x

    @override
    def accept(self, layout: FlatLayout, x: Tensor, sent: Vector, mean: Vector) -> Vector:
        return mean

    @override
    def carried(self, layout: FlatLayout, device: torch.device) -> Tensor | None:
        return None

    @override
    def accept_dense(self, layout: FlatLayout, gradient: Tensor, mean: Tensor) -> None:
        """Nothing is kept."""


class ResidualFeedback(Feedback):
    """EF14: what was left out is added to the next gradient.

    residual = (gradient + momentum * old residual) - sent. With momentum 1 nothing is ever lost: the sum of everything
    sent so far, plus the residual, is the sum of all gradients.
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._residuals = NamedBuffers()

    @override
    def prepare(self, layout: FlatLayout, gradients: Sequence[Tensor]) -> Tensor:
        # The residual buffer becomes what is sent, and `accept` subtracts what was sent: no other memory is needed.
        x = self._residuals.flat(layout, gradients[0].device)
        for gradient, part in _beside(gradients, x, layout):
            torch.add(gradient.to(part.dtype), part, alpha=self._momentum, out=part)
        return x

    @override
    def accept(self, layout: FlatLayout, x: Tensor, sent: Vector, mean: Vector) -> Vector:
        add_to(x, sent, sign=-1)
        return mean

    @override
    def abandon(self, layout: FlatLayout) -> None:
        self._residuals.drop(entry.name for entry in layout)

    @override
    def carried(self, layout: FlatLayout, device: torch.device) -> Tensor | None:
        if not self._residuals.has_any(entry.name for entry in layout):
            return None
        return self._residuals.flat(layout, device) * self._momentum

    @override
    def accept_dense(self, layout: FlatLayout, gradient: Tensor, mean: Tensor) -> None:
        self._residuals.drop(entry.name for entry in layout)

    @override
    def rescale(self, factor: float) -> None:
        self._residuals.scale(factor)

    @override
    def reset(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self._residuals.clear()
        else:
            self._residuals.drop(names)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"residuals": self._residuals.state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, is_own: bool) -> None:
        # A residual belongs to one rank. Loaded by several it would be sent several times: another rank starts at zero.
        self._residuals.load_state_dict(state["residuals"] if is_own else {})


class DifferenceFeedback(Feedback):
    """EF21: every rank sends how its gradient differs from the sum of what it sent before.

    own state += sent; mean state += mean of all sent; the mean state is the gradient to train with. It equals the mean
    of all own states if all ranks started alike. An uncompressed step makes them match from any start.

    With momentum a rank sends a running mean of its gradients: the noise of single batches, which is gone at the next
    step, does not displace what lasts.
    """

    is_shared = True

    def __init__(self, momentum: float = 0.0) -> None:
        self._momentum = momentum
        self._running = NamedBuffers()
        self._own = NamedBuffers()
        self._mean = NamedBuffers()
        self._differences = NamedBuffers()

    @override
    def prepare(self, layout: FlatLayout, gradients: Sequence[Tensor]) -> Tensor:
        device = gradients[0].device
        x, own = self._differences.flat(layout, device), self._own.flat(layout, device)
        if self._momentum:
            running = self._running.flat(layout, device)
            for gradient, part in _beside(gradients, running, layout):
                part.lerp_(gradient.to(part.dtype), 1 - self._momentum)
            return torch.sub(running, own, out=x)
        for (gradient, part), sent_before in zip(_beside(gradients, x, layout), split(own, layout), strict=True):
            torch.sub(gradient.to(part.dtype), sent_before.view(gradient.shape), out=part)
        return x

    @override
    def accept(self, layout: FlatLayout, x: Tensor, sent: Vector, mean: Vector) -> Tensor:
        add_to(self._own.flat(layout, x.device), sent)
        known = self._mean.flat(layout, x.device)
        add_to(known, mean)
        return known

    @override
    def carried(self, layout: FlatLayout, device: torch.device) -> Tensor | None:
        return None

    @override
    def accept_dense(self, layout: FlatLayout, gradient: Tensor, mean: Tensor) -> None:
        if self._momentum:
            is_first = not self._running.has_any(entry.name for entry in layout)
            running = self._running.flat(layout, gradient.device)
            running.lerp_(gradient, 1 if is_first else 1 - self._momentum)
        self._own.flat(layout, gradient.device).copy_(gradient)
        self._mean.flat(layout, mean.device).copy_(mean)

    @override
    def rescale(self, factor: float) -> None:
        for buffers in self._kept:
            buffers.scale(factor)

    @override
    def reset(self, names: Iterable[str] | None = None) -> None:
        for buffers in self._kept:
            if names is None:
                buffers.clear()
            else:
                buffers.drop(names)

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {"own": self._own.state_dict(), "mean": self._mean.state_dict()}
        return {**state, "running": self._running.state_dict()} if self._momentum else state

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, is_own: bool) -> None:
        # Ranks that all load one rank's state match if each takes the mean for what it sent.
        self._own.load_state_dict(state["own" if is_own else "mean"])
        self._mean.load_state_dict(state["mean"])
        self._running.load_state_dict(state.get("running", {}) if is_own else {})

    @property
    def _kept(self) -> tuple[NamedBuffers, ...]:
        return self._own, self._mean, self._running


def _beside(gradients: Sequence[Tensor], flat: Tensor, layout: FlatLayout) -> Iterator[tuple[Tensor, Tensor]]:
    """Each gradient with its part of a flat tensor, in its shape."""
    for gradient, part in zip(gradients, split(flat, layout), strict=True):
        yield gradient.detach(), part.view(gradient.shape)


def make_feedback(config: CompressConfig) -> Feedback:
    """The error feedback that a config names."""
    if config.error_feedback == "ef14":
        return ResidualFeedback(config.error_feedback_momentum)
    return DifferenceFeedback(config.ef21_momentum) if config.error_feedback == "ef21" else NoFeedback()
