"""Forwards that only look: their results are discarded, and they change no state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.parallel.models.kept_values import KeptValues, roots_of

_num_probes = 0

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None), Tensor)
"""What a forward may keep for itself between calls: a count, a temperature, its last output."""


def is_probing() -> bool:
    """Whether the current forward is a probe: modules that learn in forward must not do so then."""
    return _num_probes > 0


@contextmanager
def probing(module: nn.Module, *, keeps_params: bool = False) -> Iterator[None]:
    """Run forwards of `module` as probes: its buffers, such as the means of a batch norm, the attributes and variables
    that its forwards and hooks set, and the host's random state are restored afterwards; with `keeps_params` its
    parameters too, which takes a copy of them.
    """
    global _num_probes
    kept = _StateBefore(module, with_params=keeps_params)
    _num_probes += 1
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _num_probes -= 1
        kept.restore()


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Around forwards that only look: evaluation mode, no gradients, buffers and random state as before."""
    with probing(model), torch.no_grad():
        for module in model.modules():
            module.training = False
        yield


@contextmanager
def tracing(model: nn.Module) -> Iterator[None]:
    """Around a trace of the model's code: what it assigned to modules, such as proxies, is gone afterwards.

    Tensors under new names stay: they are constants that the trace has found and refers to.
    """
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    around = KeptValues(roots_of(model))
    try:
        yield
    finally:
        around.restore()
        for module, attributes, buffers in before:
            new = [
                name for name, value in vars(module).items() if name not in attributes and not isinstance(value, Tensor)
            ]
            for name in new:
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


class _StateBefore:
    """The buffers, plain attributes and, if asked for, parameters of a module, to put back.

    A module may have been given another tensor under the name of a buffer, so the tensor itself is put back; and its
    value is written even if its version is unchanged, because torch's native batch norm writes without counting. The
    writes are not counted either: a graph whose backward is still to come may have kept a buffer.
    """

    def __init__(self, module: nn.Module, *, with_params: bool) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._lists = [
            (value, list(value))
            for one in module.modules()
            for name, value in vars(one).items()
            if isinstance(value, list | deque) and name not in _OF_TORCH
        ]
        for one in module.modules():
            kept = {name: value for name, value in vars(one).items() if isinstance(value, _PLAIN)}
            self._attributes.append((vars(one), kept))
            self._buffers.append((one._buffers, dict(one._buffers)))
        tensors = [*module.buffers(), *(module.parameters() if with_params else ())]
        self._values = [(held, held.clone()) for held in map(_held, tensors)]
        plain = [param for param in module.parameters() if not hasattr(param, "to_local")] if with_params else []
        self._params = [(param, param.data) for param in plain]
        self._around = KeptValues(roots_of(module))

    def restore(self) -> None:
        for owned, before in (*self._attributes, *self._buffers):
            owned.update(before)
        for owned_list, values in self._lists:
            owned_list.clear()
            owned_list.extend(values)
        for param, data in self._params:
            if param.data_ptr() != data.data_ptr():
                param.data = data
        for held, value in self._values:
            held.copy_(value)
        self._around.restore()


def _held(tensor: Tensor) -> Tensor:
    """The memory of a tensor, or of this rank's shard of it, outside of autograd."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.data
