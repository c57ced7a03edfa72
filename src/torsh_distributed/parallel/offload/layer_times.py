"""Where the time of a step goes, layer by layer: waiting for parameters, forward, backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torsh_distributed.parallel.torch_internals import _current_graph_task_id, tree_leaves

Phase = Literal["wait", "forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Seconds of one layer since the start of training; of a GPU, on its stream."""

    name: str
    num_uses: int
    """Forward passes."""
    wait_s: float
    """Until its parameters were there."""
    forward_s: float
    """Without the layers inside it."""
    backward_s: float
    """From the gradient of its output to that of the next layer's; recomputation is included."""


class LayerClock:
    """Measures what a model spends its time on, as one sequence of switches from layer to layer.

    Made after the hooks that fetch parameters: what runs between its own outer and inner hooks is waiting.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device) -> None:
        self._device = device
        self._totals: dict[tuple[str, Phase], float] = {}
        self._uses = dict.fromkeys(layers, 0)
        self._now: tuple[str, Phase] | None = None
        self._since: float | torch.cuda.Event = 0.0
        self._outer: list[tuple[str, Phase] | None] = []
        self._pending: list[tuple[tuple[str, Phase], torch.cuda.Event, torch.cuda.Event]] = []
        self._is_end_queued = False
        self._handles: list[RemovableHandle] = []
        for name, layer in layers.items():
            self._handles += [
                layer.register_forward_pre_hook(partial(self._enter, name), prepend=True),
                layer.register_forward_pre_hook(partial(self._start, name)),
                layer.register_forward_hook(partial(self._hook_output, name, "wait"), prepend=True),
                layer.register_forward_hook(partial(self._leave, name), always_call=True),
            ]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def times(self) -> tuple[LayerTime, ...]:
        """The seconds so far, in the order of the model."""
        self._settle()
        get = self._totals.get
        return tuple(
            LayerTime(
                name=name or "the model itself",
                num_uses=num_uses,
                wait_s=get((name, "wait"), 0.0),
                forward_s=get((name, "forward"), 0.0),
                backward_s=get((name, "backward"), 0.0),
            )
            for name, num_uses in self._uses.items()
        )

    def _enter(self, name: str, *_: object) -> None:
        if _is_in_backward():  # recomputation
            self._switch((name, "wait"))
            return
        self._is_end_queued = False  # a backward that raised did not reach its end
        self._uses[name] += 1
        self._outer.append(self._now)
        self._switch((name, "wait"))

    def _start(self, name: str, *_: object) -> None:
        self._switch((name, "backward" if _is_in_backward() else "forward"))

    def _hook_output(self, name: str, phase: Phase, module: nn.Module, args: Any, output: Any) -> None:
        """In backward, switch when the gradient of the output is computed."""
        if torch.is_grad_enabled() and not _is_in_backward():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    hook: Callable[[Tensor], None] = partial(self._on_grad, (name, phase))
                    leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
                    return

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _is_in_backward():
            return
        if output is not None:  # it returned
            self._hook_output(name, "backward", module, args, output)
        self._switch(self._outer.pop() if self._outer else None)

    def _on_grad(self, place: tuple[str, Phase], grad: Tensor) -> None:
        if not self._is_end_queued:
            self._is_end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._switch(place)

    def _end_backward(self) -> None:
        self._is_end_queued = False
        self._switch(None)

    def _switch(self, place: tuple[str, Phase] | None) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
            event.record(torch.cuda.current_stream(self._device))
            if self._now is not None and isinstance(self._since, torch.cuda.Event):
                self._pending.append((self._now, self._since, event))
            if len(self._pending) > 1000:
                self._settle()
            self._since = event
        else:
            now = time.monotonic()
            if self._now is not None and isinstance(self._since, float):
                self._add(self._now, now - self._since)
            self._since = now
        self._now = place

    def _settle(self) -> None:
        """Add up what the GPU has finished."""
        pending, self._pending = self._pending, []
        for place, begin, end in pending:
            if end.query():  # type: ignore[no-untyped-call]  # untyped in torch
                self._add(place, begin.elapsed_time(end) / 1e3)
            else:
                self._pending.append((place, begin, end))

    def _add(self, place: tuple[str, Phase], seconds: float) -> None:
        self._totals[place] = self._totals.get(place, 0.0) + seconds


def _is_in_backward() -> bool:
    return _current_graph_task_id() != -1
