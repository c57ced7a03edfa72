"""Module hooks that report forward and backward to the pager and the gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torsh_distributed.parallel.offload.paging.pager import Pager
from torsh_distributed.parallel.offload.paging.unit_gradients import UnitGradients
from torsh_distributed.parallel.offload.paging.units import Unit
from torsh_distributed.parallel.torch_internals import _current_graph_task_id, tree_leaves


class PagingHooks:
    """Fetch each unit before its forward and backward, release it after.

    In backward a unit is done when all its gradients, or those of its inputs, are computed; units for which neither
    happens are released at the end of backward. A forward inside backward is recomputation: its unit is still needed.
    """

    def __init__(self, pager: Pager, gradients: UnitGradients) -> None:
        self._pager = pager
        self._gradients = gradients
        self._handles: list[RemovableHandle] = []
        self._is_end_queued = False
        for unit in pager.units:
            self._handles.append(
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True)
            )
            self._handles.append(
                unit.module.register_forward_hook(
                    partial(self._after_forward, unit), with_kwargs=True, always_call=True
                )
            )
            for position in range(unit.num_trainable):
                param = unit.param_ranges[position].param
                hook = partial(self._after_grad, unit, position)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if not _is_in_backward():
            self._is_end_queued = False  # a backward that raised did not reach its end
        self._pager.demand(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _is_in_backward():
            return
        if torch.is_grad_enabled():
            _hook_tensors(output, partial(self._before_backward, unit))
            self._hook_inputs(unit, (args, kwargs))
        self._pager.release(unit)

    def _before_backward(self, unit: Unit, grad: Tensor) -> None:
        self._queue_end()
        self._pager.demand(unit)

    def _hook_inputs(self, unit: Unit, tree: Any) -> None:
        """Release the unit when the gradients of all its inputs are computed.

        Leaf inputs do not count: their gradients may be ready before the rest of the unit's backward has run.
        """
        inner = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        missing = len(inner)

        def arrived(grad: Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                self._pager.release(unit)

        _hook_tensors(list(inner.values()), arrived)

    def _after_grad(self, unit: Unit, position: int, param: Tensor) -> None:
        self._queue_end()
        if self._gradients.take(unit, position):
            self._pager.release(unit)
            self._gradients.complete(unit)

    def _queue_end(self) -> None:
        if not self._is_end_queued:
            self._is_end_queued = True
            # Called at the end of this backward; torch's DDP and FSDP use the same callback list.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_end_queued = False
        for unit in self._pager.units:
            self._pager.release(unit)
        self._gradients.end_backward()


def _is_in_backward() -> bool:
    return _current_graph_task_id() != -1


def _hook_tensors(tree: Any, hook: Callable[[Tensor], None]) -> None:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
